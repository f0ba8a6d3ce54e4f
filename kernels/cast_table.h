// The work of one launch of CUDA casts, passed as the kernel's argument.
#pragma once

#include <span>

#include "kernels/cuda.h"
#include "kernels/number_octet.h"

namespace ballast::kernels {

inline constexpr std::size_t casts_per_launch = 256;

template <std::size_t capacity>
struct CastTable {
  Stretches<capacity> stretches;
  CastTask tasks[capacity];
};

template <std::size_t capacity>
void add_cast(CastTable<capacity>& table, const CastTask& task) {
  table.tasks[table.stretches.count] = task;
  add_stretch(table.stretches, 0, task.from.count, is_octet_aligned(task.from) && is_octet_aligned(task.to));
}

// Calls launch(table) for the tables that together hold all tasks, up to 256 each.
template <class Launch>
void each_cast_table(std::span<const CastTask> tasks, const Launch& launch) {
  CastTable<casts_per_launch> table;
  for (const CastTask& task : tasks) {
    if (task.from.count == 0) {
      continue;
    }
    add_cast(table, task);
    if (table.stretches.count == casts_per_launch) {
      launch(table);
      table.stretches.count = 0;
    }
  }
  if (table.stretches.count > 0) {
    launch(table);
  }
}

// The work of one thread in a chunk of the table.
template <std::size_t capacity>
constexpr void cast_in_chunk(const CastTable<capacity>& table, std::size_t chunk, unsigned thread) {
  const std::size_t index = stretch_of(table.stretches, chunk);
  const CastTask& task = table.tasks[index];
  cast_octet(task.from, task.to, place_of(table.stretches, index, chunk, thread));
}

}  // namespace ballast::kernels

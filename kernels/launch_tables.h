// The work of one launch of a CUDA kernel that takes many stretches of memory: a table, which is the kernel's argument. The host
// fills tables, and the octets read them.
#pragma once

#include <span>

#include "kernels/cuda.h"
#include "kernels/octet.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

inline bool is_octet_aligned(const ConstNumbers& numbers) {
  return is_octet_aligned(numbers.data, octet_size * byte_size(numbers.dtype));
}
inline bool is_octet_aligned(const Numbers& numbers) {
  return is_octet_aligned(numbers.data, octet_size * byte_size(numbers.dtype));
}
inline bool is_octet_aligned(const Summands& summands) {
  bool aligned = true;
  for (std::size_t array = 0; array < summands.arrays; ++array) {
    aligned = aligned && is_octet_aligned(summands.data[array], octet_size * byte_size(summands.dtype));
  }
  return aligned;
}

// Calls launch(table) whenever its stretches are full, and for the rest. add(item) adds an item to the table, or leaves it out.
template <class Table, std::size_t capacity, class Items, class Add, class Launch>
void each_full_table(Table& table, Stretches<capacity>& stretches, const Items& items, const Add& add,
                     const Launch& launch) {
  for (const auto& item : items) {
    add(item);
    if (stretches.count < capacity) continue;
    launch(table);
    stretches.count = 0;
  }
  if (stretches.count > 0) launch(table);
}

// --- Stochastic accumulation ---

inline constexpr std::size_t runs_per_launch = 64;

struct AccumulateTable {
  ConstNumbers from;
  Numbers into;
  Stretches<runs_per_launch> runs;
  std::uint64_t streams[runs_per_launch];  // streams of the runs' tensors
  std::uint64_t indices[runs_per_launch];  // indices of the runs' first elements
};

// Calls launch(table) for the tables that together hold all runs.
template <class Launch>
void each_accumulate_table(const ConstNumbers& from, const Numbers& into, std::span<const Run> runs,
                           const RoundingPlace& place, const Launch& launch) {
  const bool aligned = is_octet_aligned(from) && is_octet_aligned(into);  // runs begin at groups
  AccumulateTable table;
  table.from = from;
  table.into = into;
  const auto add = [&](const Run& run) {
    if (run.count == 0) return;
    table.streams[table.runs.count] = stream_of_tensor(place.stream, run.tensor);
    table.indices[table.runs.count] = index_in_tensor(run, place);
    add_stretch(table.runs, run.begin, run.count, aligned);
  };
  each_full_table(table, table.runs, runs, add, launch);
}

// --- The optimizer step: a tile, and up to 64 of its runs with their coefficients ---

template <class Rule>
struct RunStep {
  Rule rule;
  float gradient_factor;
  RoundingPlace tile;  // the place of its first element, as if all of it belonged to the run's tensor
};

template <class Rule>
struct UpdateTable {
  TileMemory tile;
  Stretches<runs_per_launch> runs;
  RunStep<Rule> steps[runs_per_launch];
};

// Returns whether every array of the tile may be accessed by whole octets from element `begin` on.
inline bool aligned_at(const TileMemory& tile, std::size_t begin) {
  TileMemory run = part(tile, begin, 0);
  bool aligned = true;
  each_array(run, [&](const std::byte* array, std::size_t bits) {
    aligned = aligned && is_octet_aligned(array, octet_size * bits / 8);
  });
  return aligned;
}

template <class Rule, class Launch>
void each_table_of(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups,
                   const Launch& launch) {
  UpdateTable<Rule> table;
  table.tile = tile;
  const auto add = [&](const Run& run) {
    const GroupStep& group = groups[run.group];
    const Rule* rule = std::get_if<Rule>(&group.rule);
    if (rule == nullptr || run.count == 0) return;
    const RoundingPlace place{stream_of_tensor(tile.rounding_stream, run.tensor), tile.first_index - run.tensor_begin};
    table.steps[table.runs.count] = {*rule, group.gradient_factor, place};
    add_stretch(table.runs, run.begin, run.count, aligned_at(tile, run.begin));
  };
  each_full_table(table, table.runs, runs, add, launch);
}

// Calls launch(table) for the tables that together hold all runs: one for each rule that occurs and each 64 runs of it.
template <class Launch>
void each_table(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups,
                const Launch& launch) {
  const auto each_rule = [&]<class... Rules>(const std::variant<Rules...>*) {
    (each_table_of<Rules>(tile, runs, groups, launch), ...);
  };
  each_rule(static_cast<const Rule*>(nullptr));
}

}  // namespace ballast::kernels

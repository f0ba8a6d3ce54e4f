// The work of one launch of the CUDA optimizer step: a tile, and up to 64 of its runs with their coefficients. It is
// passed as the kernel's argument.
#pragma once

#include "kernels/chunks.h"
#include "kernels/random_math.h"
#include "kernels/update.h"

namespace ballast::kernels {

inline constexpr std::size_t runs_per_launch = 64;

template <class Rule>
struct RunStep {
  Rule rule;
  float gradient_factor;
  RoundingPlace tile;  // of its first element, as if all of it belonged to the run's tensor
};

template <class Rule>
struct UpdateTable {
  TileMemory tile;
  Stretches<runs_per_launch> runs;
  RunStep<Rule> steps[runs_per_launch];
};

// Returns whether every array of the tile may be accessed by whole octets from element `begin` on.
inline bool aligned_at(const TileMemory& tile, std::size_t begin) {
  const TileMemory run = part(tile, begin, 0);
  const auto aligned = [](const std::byte* array, std::size_t element_bytes) {
    return is_octet_aligned(array, octet_size * element_bytes);
  };
  const std::size_t octet_of_moments = moment_bytes(tile.format, octet_size);
  return aligned(run.gradient, byte_size(tile.gradient_dtype)) &&
         aligned(run.parameter, byte_size(tile.parameter_dtype)) && aligned(run.master, master_bytes(tile.format)) &&
         is_octet_aligned(run.momentum, octet_of_moments) && is_octet_aligned(run.variance, octet_of_moments);
}

template <class Rule>
void add_run(UpdateTable<Rule>& table, const Run& run, const RunStep<Rule>& step) {
  table.steps[table.runs.count] = step;
  add_stretch(table.runs, run.begin, run.count, aligned_at(table.tile, run.begin));
}

template <class Rule, class Launch>
void each_table_of(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups,
                   const Launch& launch) {
  UpdateTable<Rule> table;
  table.tile = tile;
  for (const Run& run : runs) {
    const GroupStep& group = groups[run.group];
    const Rule* rule = std::get_if<Rule>(&group.rule);
    if (rule == nullptr || run.count == 0) {
      continue;
    }
    const RoundingPlace place{stream_of_tensor(tile.rounding_stream, run.tensor), tile.first_index - run.tensor_begin};
    add_run(table, run, {*rule, group.gradient_factor, place});
    if (table.runs.count == runs_per_launch) {
      launch(table);
      table.runs.count = 0;
    }
  }
  if (table.runs.count > 0) {
    launch(table);
  }
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

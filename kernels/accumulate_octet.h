// The stochastic accumulation of one CUDA thread: eight elements of a run. A table is the work of one launch, and the
// kernel's argument.
#pragma once

#include "kernels/number_octet.h"
#include "kernels/random_math.h"
#include "kernels/update_table.h"

namespace ballast::kernels {

struct AccumulateTable {
  ConstNumbers from;
  Numbers into;
  Stretches<runs_per_launch> runs;
  std::uint64_t streams[runs_per_launch];  // of the runs' tensors
  std::uint64_t indices[runs_per_launch];  // of the runs' first elements
};

// Calls launch(table) for the tables that together hold all runs.
template <class Launch>
void each_accumulate_table(const ConstNumbers& from, const Numbers& into, std::span<const Run> runs,
                           const RoundingPlace& place, const Launch& launch) {
  const bool aligned = is_octet_aligned(from) && is_octet_aligned(into);  // runs begin at groups
  AccumulateTable table;
  table.from = from;
  table.into = into;
  for (const Run& run : runs) {
    if (run.count == 0) continue;
    table.streams[table.runs.count] = stream_of_tensor(place.stream, run.tensor);
    table.indices[table.runs.count] = index_in_tensor(run, place);
    add_stretch(table.runs, run.begin, run.count, aligned);
    if (table.runs.count == runs_per_launch) {
      launch(table);
      table.runs.count = 0;
    }
  }
  if (table.runs.count > 0) launch(table);
}

constexpr void accumulate_in_chunk(const AccumulateTable& table, std::size_t chunk, unsigned thread) {
  const std::size_t run = stretch_of(table.runs, chunk);
  const OctetPlace place = place_of(table.runs, run, chunk, thread);
  const std::uint64_t index = table.indices[run] + (place.first - table.runs.at[run].begin);
  const RoundingKey key = rounding_key(table.streams[run], index);
  const FloatOctet added = load_floats(table.from, place);
  const FloatOctet before = load_floats({table.into.data, table.into.count, table.into.dtype}, place);
  Octet sum{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    const std::uint32_t random = random_bits(static_cast<std::uint32_t>(index + i), key);
    sum.at[i] = accumulated_stochastic(before.at[i], added.at[i], random);
  }
  store_octet(table.into, place, sum);
}

}  // namespace ballast::kernels

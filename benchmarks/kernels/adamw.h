// AdamW as bf16 training uses it: bf16 gradients in, bf16 parameters out, the state of one format rewritten.
#pragma once

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

struct Shard {
  StateFormat format;
  std::size_t tiles;
  std::size_t elements_of_tile;
};

// Gradients, parameters and state, with plausible values, laid out as the library lays out tiles.
class AdamWState {
 public:
  AdamWState(const Shard& shard, const Threads& threads);

  void step(kernels::Backend& backend);

 private:
  Buffer gradient_;
  Buffer parameter_;
  Buffer state_;
  std::vector<TileMemory> tiles_;
  std::size_t steps_ = 0;
};

// Reads and writes memory, with all threads.
Subject adamw(StateFormat format, const Setting& setting);

// Has a power of two of elements, so that gradient, parameter, master and moments lie at distances that are powers of
// two. A memory controller may then send them all to the same bank.
Subject adamw_power_of_two(StateFormat format, const Setting& setting);

// Works in tiles, as the engine updates: each has its state in one stretch of memory.
Subject adamw_tiles(StateFormat format, const Setting& setting);

// Does the same arithmetic on as many elements, but each thread stays in its cache: the rate if memory cost nothing.
Subject adamw_from_cache(StateFormat format, const Setting& setting);

}  // namespace ballast::benchmarks

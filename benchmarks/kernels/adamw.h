// AdamW as bf16 training uses it: bf16 gradients in, bf16 parameters out, the state of one format rewritten.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

// Gradients, parameters and state of `elements` elements, with plausible values.
class AdamWState {
 public:
  AdamWState(kernels::StateFormat format, std::size_t elements, Threads& threads);

  void step(kernels::Backend& backend);

 private:
  std::byte* memory(std::size_t bytes, Threads& threads);

  std::vector<Buffer> buffers_;
  kernels::UpdateTile tile_;
  std::size_t steps_ = 0;
};

// Bytes that one step has to move for an element, read and written ones counted alike.
double adamw_bytes_of_an_element(kernels::StateFormat format);

// From memory, with all threads.
Subject adamw(kernels::StateFormat format, const Setting& setting);

// The same arithmetic on as many elements, but each thread stays in its cache: what it would reach if memory cost nothing.
Subject adamw_from_cache(kernels::StateFormat format, const Setting& setting);

}  // namespace ballast::benchmarks

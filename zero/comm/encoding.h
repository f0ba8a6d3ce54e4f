// Encoded collectives: ranks send blocks of codes (kernels/quantize.h) instead of values. A gather rounds to nearest, a reduction
// stochastically, by bits that depend on its stream, on the rank or host that rounds, and on the element.
#pragma once

#include <ballast/view.h>

#include "kernels/quantize.h"
#include "kernels/update.h"

namespace ballast {

struct Encoding {
  kernels::CodeBits values = kernels::CodeBits::eight;  // of each rank's values
  // Of sums of several ranks: those of a host on their way to other hosts, and the result of an all_reduce on its way to all
  // ranks.
  kernels::CodeBits sums = kernels::CodeBits::eight;
  std::uint64_t stream = 0;  // of random bits; equal on all ranks, and new for each reduction
  // The tensors of a reduction's elements, in order; each of them begins at a group, and padding belongs to the one before it. The
  // random bits of an element are those of its tensor and its index there, as in kernels::Backend::accumulate_stochastic(), so
  // that they do not depend on how tensors are put together. Without any, all elements are of tensor 0.
  std::span<const kernels::Run> tensors{};
  std::uint64_t first_index = 0;  // RoundingPlace::first_index of the tensors
  // u8, which the backend reaches: at least kernels::encoded_parts_bytes() in a gather and a reduce_scatter, and
  // encoded_all_reduce_bytes() in an all_reduce. Its contents are lost. Where peers read in place, it lies in memory of
  // Communicator::shared_memory() on all ranks or on none.
  View memory;
};

}  // namespace ballast

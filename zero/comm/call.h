// The description of a collective call that ranks compare: all ranks of a group must make the same call.
#pragma once

#include <ballast/view.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/quantize_math.h"
#include "zero/comm/purpose.h"

namespace ballast {

enum class Collective : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  sum,
  broadcast,
  barrier,
  split,
  exchange
};

struct Call {
  Collective kind = Collective::barrier;
  DType dtype = DType::u8;
  std::uint32_t root = 0;
  std::uint64_t count = 0;  // of an exchange of parts: PartSizes::bytes, for one peer
  Purpose purpose = Purpose::values;
  DType sum = DType::fp32;  // the format of a sum
  bool is_encoded = false;
  kernels::CodeBits values = kernels::CodeBits::eight;  // if it is encoded
  kernels::CodeBits sums = kernels::CodeBits::eight;
  std::uint64_t sizes = 0;  // of an exchange of parts: PartSizes::checksum
  bool operator==(const Call&) const = default;
};

std::string text(const Call& call);  // "reduce_scatter of 100 bf16 in fp32"

// Throws B1001 that names the peer if the calls differ.
void require_same(const Call& ours, const Call& theirs, std::string_view peer);

}  // namespace ballast

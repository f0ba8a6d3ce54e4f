// What a rank calls, as it is told to its peers, who must be making the same call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/runtime/dtype.h"

namespace ballast {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce, sum, broadcast, barrier, split };

// Tells calls apart that are alike in kind and size, but belong to different points of a program.
enum class Purpose : std::uint8_t { any, agreement, rendezvous };

struct Call {
  Collective kind = Collective::barrier;
  DType dtype = DType::u8;
  std::uint32_t root = 0;
  std::uint64_t count = 0;
  Purpose purpose = Purpose::any;
  bool operator==(const Call&) const = default;
};

std::string text(const Call& call);  // "reduce_scatter of 100 bf16"

void require_same(const Call& ours, const Call& theirs, std::string_view peer);

}  // namespace ballast

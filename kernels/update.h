// The optimizer step over a piece of a shard: gradient in, master, moments and parameter rewritten, in one pass.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/rules/rule.h"
#include "kernels/runtime/dtype.h"
#include "kernels/state_format.h"

namespace ballast::kernels {

// The memory of the piece. All pointers refer to its first element, in memory that the backend can access.
struct UpdateTile {
  StateFormat format = StateFormat::fp32;
  DType parameter_dtype = DType::bf16;  // fp32 and fp16 with format fp32 only; an fp32 parameter is itself the master
  DType gradient_dtype = DType::bf16;
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  std::byte* master = nullptr;       // null if the parameter is the master
  std::byte* momentum = nullptr;     // null if the rule has none
  std::byte* variance = nullptr;     // null if the rule has none
  float* momentum_scales = nullptr;  // format compact: one for each group of elements
  float* variance_scales = nullptr;
  std::size_t count = 0;
  std::uint64_t first_index = 0;      // of the first element in its unit; determines the random bits
  std::uint64_t rounding_stream = 0;  // see random_math.h
};

// The step of one parameter group.
struct GroupStep {
  Rule rule;
  float gradient_factor = 1.0f;  // unscaling, averaging and clipping in one; negative to maximise
};

// A stretch of the piece that belongs to one parameter group. Runs come in order and do not overlap; elements outside
// all of them stay as they are.
struct Run {
  std::size_t begin = 0;
  std::size_t count = 0;
  std::size_t group = 0;
};

// The piece from `first` on, `count` elements long. With format compact, `first` is a multiple of the group size.
UpdateTile part(const UpdateTile& tile, std::size_t first, std::size_t count);

// Throws a UsageError for wrong arguments. Every backend's update calls it first.
void check_update(const UpdateTile& tile, std::span<const Run> runs, std::span<const GroupStep> groups);

}  // namespace ballast::kernels

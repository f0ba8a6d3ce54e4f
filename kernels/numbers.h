// Values in memory, as the walks take them. They are plain structs: a walk is compiled for one instruction set, or by
// nvcc, and a checking View would bring code with it that the linker might then choose for other callers too.
#pragma once

#include <ballast/view.h>

#include <cstddef>

namespace ballast::kernels {

struct Numbers {
  std::byte* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::fp32;
};

struct ConstNumbers {
  const std::byte* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::fp32;
};

// Arrays of one format that are added element by element, in order.
struct Summands {
  static constexpr std::size_t most = 128;

  const std::byte* data[most] = {};
  std::size_t arrays = 0;  // one or more
  std::size_t count = 0;   // elements in each
  DType dtype = DType::fp32;
  bool continues = false;  // a sum that is in the target already
};

// The destination of results: the caches, or memory past the caches, which saves reading the overwritten lines.
enum class Stores : bool { cached, streamed };

}  // namespace ballast::kernels

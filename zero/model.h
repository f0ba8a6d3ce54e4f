// What is trained: units of tensors. A unit's parameters are gathered together; a transformer block is a typical one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/runtime/dtype.h"

namespace ballast {

struct Tensor {
  std::string name;
  std::vector<std::size_t> shape;
  std::size_t group = 0;  // of parameters with the same options

  std::size_t elements() const;
};

struct Unit {
  std::string name;
  DType dtype = DType::bf16;
  std::vector<Tensor> tensors{};
};

struct Model {
  std::vector<Unit> units;
};

}  // namespace ballast

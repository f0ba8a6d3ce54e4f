// Products of matrices on a GPU.
#pragma once

#include <memory>
#include <string>

#include "examples/gpt/matrix.h"
#include "kernels/runtime/device.h"

namespace ballast::gpt {

// The distance between the matrices of several products of one shape, in elements.
struct Steps {
  std::size_t count = 1;
  std::size_t a = 0;
  std::size_t b = 0;
  std::size_t to = 0;
};

// Work goes into the stream, which outlives it. It ignores the bias of a product.
class CublasMultiplier {
 public:
  CublasMultiplier(StreamHandle stream, int gpu);
  ~CublasMultiplier();
  std::string library() const;
  void operator()(const Product& product, const Steps& steps = {}) const;  // views are those of the first product

 private:
  struct Handle;
  std::unique_ptr<Handle> handle_;
};

}  // namespace ballast::gpt

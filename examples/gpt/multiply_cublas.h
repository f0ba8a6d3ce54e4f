// Products of matrices on a GPU.
#pragma once

#include <memory>
#include <string>

#include "examples/gpt/matrix.h"
#include "kernels/runtime/device.h"

namespace ballast::gpt {

// How far apart the matrices of several products of one shape begin, in elements.
struct Steps {
  std::size_t count = 1;
  std::size_t a = 0;
  std::size_t b = 0;
  std::size_t to = 0;
};

// Work goes into the stream, which outlives it. A product's bias is left out.
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

// Products of matrices on one CPU thread, with the library of this build. The bits of a product depend only on its
// shape, not on threads or earlier products.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "examples/gpt/matrix.h"

namespace ballast::gpt {

// Any number of threads may call it at once.
class Multiplier {
 public:
  Multiplier();
  ~Multiplier();
  std::string library() const;
  void operator()(const Product& product) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// A product in plain C++: for machines without a matrix library, and for products that the library does not support.
void multiply_portable(const Product& product);

// A product in fp32 arithmetic, for processors without bf16 arithmetic. `multiply` gets factors in fp32 without gaps, and adds to
// the result of the piece before, or to zeros.
void multiply_widened(const Product& product, const std::function<void(const Product&)>& multiply);

}  // namespace ballast::gpt

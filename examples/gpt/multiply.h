// Products of matrices on one CPU thread, by the library that this was built with. A product's bits depend on its shape
// only: not on threads, and not on what ran before.
#pragma once

#include <memory>
#include <string>

#include "examples/gpt/matrix.h"

namespace ballast::gpt {

// Any number of threads may call at once.
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

}  // namespace ballast::gpt

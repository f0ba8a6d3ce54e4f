// Products of matrices on one CPU thread, with the library of this build. The bits of a product depend only on its
// shape, not on threads or earlier products.
#pragma once

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

}  // namespace ballast::gpt

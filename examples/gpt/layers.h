// The layers with parameters, over a lease. Each has the index of its weight; its bias has the next index.
#pragma once

#include <ballast/lease.h>

#include "examples/gpt/maths.h"

namespace ballast::gpt {

struct Layer {
  Maths& maths;
  const Lease& lease;
  std::size_t weight;

  ConstView weights() const { return lease.tensor(weight); }
  ConstView bias() const { return lease.tensor(weight + 1); }
};

// y = x weights^T + bias, or += that.
struct Linear : Layer {
  void forward(const ConstView& x, const View& y, bool add = false) const;
  void backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const;
};

struct Norm : Layer {
  void forward(const ConstView& x, const View& y) const;
  void backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const;  // adds to x's
};

}  // namespace ballast::gpt

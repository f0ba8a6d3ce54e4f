// The layers that have parameters, over a lease: each has a weight of a number, and a bias of the next one.
#pragma once

#include "benchmarks/gpt/maths.h"
#include "zero/engine/lease.h"

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

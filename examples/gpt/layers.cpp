#include "examples/gpt/layers.h"

namespace ballast::gpt {

void Linear::forward(const ConstView& x, const View& y, bool add) const {
  const std::size_t outputs = bias().count(), inputs = weights().count() / outputs;
  maths.multiply({.a = matrix(x, inputs),
                  .b = transposed(weights(), inputs),
                  .to = matrix(y, outputs),
                  .bias = bias(),
                  .add = add});
}

void Linear::backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const {
  const std::size_t outputs = bias().count(), inputs = weights().count() / outputs;
  maths.multiply({.a = transposed(gradient, outputs),
                  .b = matrix(x, inputs),
                  .to = matrix(lease.gradient(weight), inputs),
                  .add = true});
  maths.add_rows(matrix(gradient, outputs), lease.gradient(weight + 1));
  maths.multiply({.a = matrix(gradient, outputs), .b = matrix(weights(), inputs), .to = matrix(x_gradient, inputs)});
}

void Norm::forward(const ConstView& x, const View& y) const { maths.layer_norm(x, {weights(), bias()}, y); }

void Norm::backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const {
  maths.layer_norm_backward(x, {weights(), bias()}, gradient,
                            {lease.gradient(weight), lease.gradient(weight + 1), x_gradient});
}

}  // namespace ballast::gpt

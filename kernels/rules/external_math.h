// No update: the trainer has changed the master itself. The walk only derives the parameter from it, as after every
// rule.
#pragma once

#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct External {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  template <class F>
  constexpr void operator()(F&, F&, SecondMoment<F>&, F) const {}
};

}  // namespace ballast::kernels

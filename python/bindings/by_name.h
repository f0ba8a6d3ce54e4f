// An array with an entry for each value of an enumeration, as a dictionary.
#pragma once

#include <array>

#include "python/bindings/bindings.h"

namespace ballast::python {

template <class Enum, class Value, std::size_t count>
py::dict by_name(const std::array<Value, count>& values) {
  py::dict named;
  for (std::size_t i = 0; i < count; ++i) {
    named[py::str(std::string(name(static_cast<Enum>(i))))] = values[i];
  }
  return named;
}

}  // namespace ballast::python

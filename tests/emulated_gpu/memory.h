// Where the bytes of emulated device memory are.
#pragma once

#include "kernels/runtime/view.h"

namespace ballast::testing {

// What can be read and written instead of an address in device memory; host addresses stay what they are.
void* reachable(const void* address);

inline View reachable(const View& view) {
  return {static_cast<std::byte*>(reachable(view.data())), view.count(), view.dtype()};
}
inline ConstView reachable(const ConstView& view) {
  return {static_cast<const std::byte*>(reachable(view.data())), view.count(), view.dtype()};
}

}  // namespace ballast::testing

// Gloo installs headers that include this one of its headers, and leaves it out. These are the two classes that they need to know,
// with the members and the sizes that they have in Gloo. Only Gloo calls their functions.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr final {
 private:
  std::shared_ptr<T> ptr_;
};

template <typename T>
class WeakNonOwningPtr final {
 protected:
  std::weak_ptr<T> ptr_;
};

}  // namespace gloo

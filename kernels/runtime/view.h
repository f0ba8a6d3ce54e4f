// Views: a pointer, a count and a number format. They own nothing, and may point into any kind of memory.
#pragma once

#include <fmt/format.h>

#include <span>
#include <type_traits>

#include "kernels/runtime/dtype.h"
#include "kernels/runtime/error.h"

namespace ballast {

template <class Byte>
class BasicView {
  template <class T>
  using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;

 public:
  BasicView() = default;
  BasicView(Byte* data, std::size_t count, DType dtype) : data_(data), count_(count), dtype_(dtype) {}

  template <class T>
    requires(!std::is_const_v<T> || std::is_const_v<Byte>)
  BasicView(std::span<T> elements)
      : data_(reinterpret_cast<Byte*>(elements.data())),
        count_(elements.size()),
        dtype_(dtype_of<std::remove_const_t<T>>) {}

  // A writable view converts to a readable one. (A constructor: nvcc warns about a conversion to a view's own type.)
  template <class Writable>
    requires(std::is_same_v<const Writable, Byte>)
  BasicView(const BasicView<Writable>& view) : BasicView(view.data(), view.count(), view.dtype()) {}

  Byte* data() const { return data_; }
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * byte_size(dtype_); }
  DType dtype() const { return dtype_; }
  std::span<Byte> as_bytes() const { return {data_, bytes()}; }

  template <class T>
  std::span<Element<T>> as() const {
    require(dtype_ == dtype_of<T>, Code::wrong_dtype, [&] {
      return Problem{.what = "cannot read a view: it has another number format",
                     .needed = std::string(name(dtype_of<T>)),
                     .available = std::string(name(dtype_))};
    });
    return {reinterpret_cast<Element<T>*>(data_), count_};
  }

  BasicView part(std::size_t first, std::size_t count) const {
    require(first <= count_ && count <= count_ - first, Code::wrong_size, [&] {
      return Problem{.what = "cannot take a part of a view: it reaches past the end",
                     .needed = fmt::format("{} + {} elements", first, count),
                     .available = std::to_string(count_)};
    });
    return {data_ + first * byte_size(dtype_), count, dtype_};
  }

 private:
  Byte* data_ = nullptr;
  std::size_t count_ = 0;
  DType dtype_ = DType::fp32;
};

using View = BasicView<std::byte>;
using ConstView = BasicView<const std::byte>;

}  // namespace ballast

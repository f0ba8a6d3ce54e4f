// Views: a pointer, a count and a number format. They own nothing, and may point into any kind of memory.
#pragma once

#include <ballast/error.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace ballast {

enum class DType : std::uint8_t { fp32, bf16, fp16, u8 };

// Bit patterns, without arithmetic.
struct bf16 {
  std::uint16_t bits;
};
struct fp16 {
  std::uint16_t bits;
};

constexpr std::size_t byte_size(DType dtype) {
  constexpr std::size_t sizes[] = {4, 2, 2, 1};
  return sizes[static_cast<std::size_t>(dtype)];
}

constexpr std::string_view name(DType dtype) {
  constexpr std::string_view names[] = {"fp32", "bf16", "fp16", "u8"};
  return names[static_cast<std::size_t>(dtype)];
}

template <class T>
struct DTypeOf;  // defined for the element types of buffers only
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::fp32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<fp16> {
  static constexpr DType value = DType::fp16;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

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

  // Throws B1002 for another number format than the view's.
  template <class T>
  std::span<Element<T>> as() const {
    require(dtype_ == dtype_of<T>, Code::wrong_dtype, [&] {
      return Problem{.what = "cannot read a view: it has another number format",
                     .needed = std::string(name(dtype_of<T>)),
                     .available = std::string(name(dtype_))};
    });
    return {reinterpret_cast<Element<T>*>(data_), count_};
  }

  // Throws B1003 for a part that reaches past the end.
  BasicView part(std::size_t first, std::size_t count) const {
    require(first <= count_ && count <= count_ - first, Code::wrong_size, [&] {
      return Problem{.what = "cannot take a part of a view: it reaches past the end",
                     .needed = std::to_string(first) + " + " + std::to_string(count) + " elements",
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

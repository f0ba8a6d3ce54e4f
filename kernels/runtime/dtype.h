// The number formats of buffers. bf16 and fp16 are bit patterns here; arithmetic on them lives in the *_math.h files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

enum class DType : std::uint8_t { fp32, bf16, fp16, u8 };

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

}  // namespace ballast

// The number formats of tensors in files.
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <optional>
#include <string_view>

namespace ballast {

struct NumberFormat {
  std::string_view torch;                       // torch's name of it
  std::optional<std::string_view> safetensors;  // its name in safetensors files; none if they cannot hold it
  std::size_t bytes = 0;
  std::optional<DType> ours{};
};

constexpr NumberFormat number_formats[] = {{"float32", "F32", 4, DType::fp32},
                                           {"bfloat16", "BF16", 2, DType::bf16},
                                           {"float16", "F16", 2, DType::fp16},
                                           {"uint8", "U8", 1, DType::u8},
                                           {"bool", "BOOL", 1},
                                           {"int8", "I8", 1},
                                           {"float8_e4m3fn", "F8_E4M3", 1},
                                           {"float8_e4m3fnuz", {}, 1},
                                           {"float8_e5m2", "F8_E5M2", 1},
                                           {"float8_e5m2fnuz", {}, 1},
                                           {"float8_e8m0fnu", "F8_E8M0", 1},
                                           {"int16", "I16", 2},
                                           {"uint16", "U16", 2},
                                           {"complex32", {}, 4},
                                           {"int32", "I32", 4},
                                           {"uint32", "U32", 4},
                                           {"complex64", "C64", 8},
                                           {"float64", "F64", 8},
                                           {"int64", "I64", 8},
                                           {"uint64", "U64", 8},
                                           {"complex128", {}, 16}};

}  // namespace ballast

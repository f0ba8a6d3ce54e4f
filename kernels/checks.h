// The checks that every backend makes before its work. Each throws a UsageError.
#pragma once

#include <ballast/view.h>

#include <span>
#include <string_view>

#include "kernels/backend.h"
#include "kernels/update.h"

namespace ballast::kernels {

void check_cast(const ConstView& from, const View& to);                // equal counts; both u8 or neither; no overlap
void check_sum(std::span<const ConstView> from, const View& into);     // some arrays of one format
void check_passes(std::span<const ConstView> from, const View& into);  // one pass, or a sum in fp32
void check_accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                                 const RoundingPlace& place);

// Runs lie in order, apart, within `count` elements.
void check_runs(std::span<const Run> runs, std::size_t count);

void check_update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups);

void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding);
void check_dequantize(const ConstQuantized& from, const View& to);
void check_sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into);

// `what` names the argument in the functions below.
void check_floating(const ConstView& values, std::string_view what);
void check_memory(const ConstView& values, std::string_view what);  // not null; aligned to its elements
void check_size(const ConstView& values, DType dtype, std::size_t count, std::string_view what);

}  // namespace ballast::kernels

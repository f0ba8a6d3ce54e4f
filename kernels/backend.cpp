#include "kernels/backend.h"

namespace ballast::kernels {
namespace {

[[noreturn]] void lacks(std::string_view operation) {
  fail(Code::unsupported, {.what = fmt::format("this backend has no {}", operation), .remedy = "use the CPU backend"});
}

}  // namespace

void Backend::cast(const ConstView&, const View&) { lacks("cast"); }
void Backend::copy_pieces(std::span<const CopyPiece>) { lacks("copy of pieces"); }
void Backend::fill(const View&, float) { lacks("fill"); }
void Backend::accumulate(const ConstView&, float, const View&) { lacks("accumulation"); }
void Backend::sum_of_squares(const ConstView&, ExactSum*) { lacks("sum of squares"); }
void Backend::first_non_finite(const ConstView&, std::uint64_t, std::uint64_t*) {
  lacks("search for NaN and infinity");
}
void Backend::quantize(const ConstView&, const Quantized&, const CodeRounding&) { lacks("quantization"); }
void Backend::dequantize(const ConstQuantized&, const View&) { lacks("dequantization"); }

}  // namespace ballast::kernels

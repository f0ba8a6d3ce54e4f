#include "kernels/checks.h"

#include <ballast/state_format.h>

#include <fmt/format.h>
#include <cmath>
#include <functional>

#include "kernels/numbers.h"

namespace ballast::kernels {
namespace {

void check_counts(const ConstView& from, const ConstView& to, std::string_view operation) {
  require(from.count() == to.count(), Code::wrong_size, [&] {
    return Problem{
        .what = fmt::format("cannot start {}: source and target have different numbers of elements", operation),
        .needed = fmt::format("{} elements", to.count()),
        .available = fmt::format("{} elements", from.count())};
  });
}

// Working in place is correct if every element is read before its place is written, so with elements of the same size.
void check_apart(const ConstView& from, const ConstView& to, std::string_view operation) {
  const std::less<> before;
  const bool in_place = from.data() == to.data() && byte_size(from.dtype()) == byte_size(to.dtype());
  const bool apart = !before(from.data(), to.data() + to.bytes()) || !before(to.data(), from.data() + from.bytes());
  require(in_place || apart, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot start {}: source and target overlap", operation),
                   .needed = "memory apart, or in place with elements of the same size",
                   .available = fmt::format("a target that starts {} bytes after its source", to.data() - from.data())};
  });
}

void check_copy(const ConstView& from, const View& to, std::string_view operation) {
  require((from.dtype() == DType::u8) == (to.dtype() == DType::u8), Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("{} cannot convert {} to {}", operation, name(from.dtype()), name(to.dtype())),
                   .needed = "fp32, bf16 or fp16 on both sides, or u8 on both"};
  });
  check_memory(from, fmt::format("the source of {}", operation));
  check_memory(to, fmt::format("the target of {}", operation));
  check_counts(from, to, operation);
  check_apart(from, to, operation);
}

}  // namespace

void check_cast(const ConstView& from, const View& to) { check_copy(from, to, "a cast"); }

void check_fill(const View& to, float value) {
  check_memory(to, "the target of a fill");
  const bool is_byte = value >= 0.0f && value <= 255.0f && value == std::floor(value);
  require(to.dtype() != DType::u8 || is_byte, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot fill bytes with {}", value), .needed = "a whole number from 0 to 255"};
  });
}

void check_accumulate(const ConstView& from, const View& into) {
  check_floating(from, "the source of an accumulation");
  check_floating(into, "the target of an accumulation");
  check_counts(from, into, "an accumulation");
  check_apart(from, into, "an accumulation");
}

void check_sum(std::span<const ConstView> from, const View& into) {
  require(!from.empty(), Code::bad_argument,
          [&] { return Problem{.what = "cannot sum arrays", .needed = "one array or more", .available = "none"}; });
  for (const ConstView& each : from) {
    check_accumulate(each, into);
    require(each.dtype() == from[0].dtype(), Code::wrong_dtype, [&] {
      return Problem{.what = "cannot sum arrays of different formats",
                     .needed = std::string(name(from[0].dtype())),
                     .available = std::string(name(each.dtype()))};
    });
  }
}

void check_passes(std::span<const ConstView> from, const View& into) {
  require(from.size() <= Summands::most || into.dtype() == DType::fp32, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot sum {} arrays into {} on a GPU", from.size(), name(into.dtype())),
                   .needed = fmt::format("at most {} arrays, or a sum in fp32", Summands::most)};
  });
}

void check_accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                                 const RoundingPlace& place) {
  check_size(from, DType::bf16, into.count(), "the source of a stochastic accumulation");
  check_size(into, DType::bf16, into.count(), "the target of a stochastic accumulation");
  check_apart(from, into, "a stochastic accumulation");
  check_runs(runs, into.count());
  for (const Run& run : runs) {
    require(run.begin % group_size == 0 && index_in_tensor(run, place) % group_size == 0, Code::unaligned, [&] {
      return Problem{
          .what = "cannot start a stochastic accumulation: a run does not begin at a group of elements",
          .needed = fmt::format("multiples of {} elements", group_size),
          .available = fmt::format("a run at {}, at {} of its tensor", run.begin, index_in_tensor(run, place))};
    });
  }
}

void check_pieces(std::span<const CopyPiece> pieces) {
  for (const CopyPiece& piece : pieces) {
    check_copy(piece.from, piece.to, "a copy of pieces");
  }
}

void check_floating(const ConstView& values, std::string_view what) {
  require(values.dtype() != DType::u8, Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("{} must be floating-point numbers", what),
                   .needed = "fp32, bf16 or fp16",
                   .available = std::string(name(values.dtype()))};
  });
  check_memory(values, what);
}

void check_memory(const ConstView& values, std::string_view what) {
  require(values.data() != nullptr || values.count() == 0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("{} has no memory", what),
                   .needed = fmt::format("{} bytes", values.bytes()),
                   .available = "a null pointer"};
  });
  const auto address = reinterpret_cast<std::uintptr_t>(values.data());
  require(address % byte_size(values.dtype()) == 0, Code::unaligned, [&] {
    return Problem{.what = fmt::format("{} does not lie at a multiple of its elements' size", what),
                   .needed = fmt::format("a multiple of {} bytes", byte_size(values.dtype())),
                   .available = fmt::format("address {:#x}", address)};
  });
}

void check_size(const ConstView& values, DType dtype, std::size_t count, std::string_view what) {
  require(values.dtype() == dtype, Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("{} have the wrong number format", what),
                   .needed = std::string(name(dtype)),
                   .available = std::string(name(values.dtype()))};
  });
  require(values.count() == count, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("{} have the wrong number of elements", what),
                   .needed = std::to_string(count),
                   .available = std::to_string(values.count())};
  });
  check_memory(values, what);
}

}  // namespace ballast::kernels

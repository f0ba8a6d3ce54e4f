#include "kernels/checks.h"

#include <ballast/state_format.h>

#include <fmt/format.h>
#include <functional>

#include "kernels/numbers.h"
#include "kernels/state_math.h"

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

}  // namespace

void check_cast(const ConstView& from, const View& to) {
  require((from.dtype() == DType::u8) == (to.dtype() == DType::u8), Code::wrong_dtype, [&] {
    return Problem{.what = fmt::format("a cast cannot convert {} to {}", name(from.dtype()), name(to.dtype())),
                   .needed = "fp32, bf16 or fp16 on both sides, or u8 on both"};
  });
  check_memory(from, "the source of a cast");
  check_memory(to, "the target of a cast");
  check_counts(from, to, "a cast");
  check_apart(from, to, "a cast");
}

void check_sum(std::span<const ConstView> from, const View& into) {
  require(!from.empty(), Code::bad_argument,
          [&] { return Problem{.what = "cannot sum arrays", .needed = "one array or more", .available = "none"}; });
  check_floating(into, "the target of a sum");
  for (const ConstView& each : from) {
    check_floating(each, "the source of a sum");
    check_counts(each, into, "a sum");
    check_apart(each, into, "a sum");
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

// --- The optimizer step ---

namespace {

void need(const void* pointer, std::size_t element_bytes, std::string_view part, StateFormat format) {
  require(pointer != nullptr, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot update: there is no memory for the {}", part),
                   .needed = fmt::format("memory for the {} in format {}", part, name(format))};
  });
  require(reinterpret_cast<std::uintptr_t>(pointer) % element_bytes == 0, Code::unaligned, [&] {
    return Problem{.what = fmt::format("cannot update: the {} begins inside an element", part),
                   .needed = fmt::format("an address that is a multiple of {}", element_bytes),
                   .available = fmt::format("{}", pointer)};
  });
}

void check_formats(const TileMemory& tile) {
  const bool fp32_format = tile.format == StateFormat::fp32;
  require(tile.gradient_dtype != DType::u8 && tile.parameter_dtype != DType::u8, Code::wrong_dtype, [&] {
    return Problem{
        .what = "gradients and parameters must be floating-point numbers",
        .needed = "fp32, bf16 or fp16",
        .available = fmt::format("gradient {}, parameter {}", name(tile.gradient_dtype), name(tile.parameter_dtype))};
  });
  require(fp32_format || tile.parameter_dtype == DType::bf16, Code::unsupported, [&] {
    return Problem{.what = fmt::format("state format {} stores the lower bits of a bf16 parameter", name(tile.format)),
                   .needed = "a bf16 parameter",
                   .available = std::string(name(tile.parameter_dtype)),
                   .remedy = "use state format fp32 for fp16 and fp32 parameters"};
  });
}

void check_direction(const TileMemory& tile) {
  require(tile.parameter_dtype == DType::bf16 && tile.master == nullptr, Code::bad_argument, [&] {
    return Problem{
        .what = "cannot make a direction: it takes the place of the parameter, without a master",
        .needed = "bf16, and no master",
        .available = fmt::format("{}, and {} master", name(tile.parameter_dtype), tile.master == nullptr ? "no" : "a")};
  });
}

void check_memory(const TileMemory& tile, const Rule& rule) {
  need(tile.parameter, byte_size(tile.parameter_dtype), "parameter", tile.format);
  need(tile.gradient, byte_size(tile.gradient_dtype), "gradient", tile.format);
  if (std::visit([](const auto& r) { return MakesDirection<std::decay_t<decltype(r)>>; }, rule)) {
    check_direction(tile);
  } else if (tile.parameter_dtype != DType::fp32) {
    need(tile.master, master_bytes(tile.format), "master", tile.format);
  }
  const auto [momentum, variance] =
      std::visit([](const auto& r) { return std::pair(r.has_momentum, r.has_variance); }, rule);
  const std::size_t moment = moment_bytes(tile.format, 1);
  if (momentum) need(tile.momentum, moment, "momentum", tile.format);
  if (variance) need(tile.variance, moment, "variance", tile.format);
  if (has_scales(tile.format)) {
    if (momentum) need(tile.momentum_scales, sizeof(float), "momentum scales", tile.format);
    if (variance) need(tile.variance_scales, sizeof(float), "variance scales", tile.format);
  }
}

void check_inside(const Run& run, std::size_t count) {
  require(run.begin <= count && run.count <= count - run.begin, Code::wrong_size, [&] {
    return Problem{.what = "a run reaches past the end of its tile",
                   .needed = fmt::format("{} + {} elements", run.begin, run.count),
                   .available = fmt::format("{}", count)};
  });
}

void check_run(const TileMemory& tile, const Run& run, std::size_t groups) {
  check_inside(run, tile.count);
  require(run.group < groups, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("a run names parameter group {}", run.group),
                   .needed = "the number of a group of the training",
                   .available = fmt::format("{} groups", groups)};
  });
  const bool rounds_by_index = tile.format == StateFormat::bf16 || has_scales(tile.format);
  require(!rounds_by_index || (run.begin % group_size == 0 && tile.first_index % group_size == 0), Code::unaligned,
          [&] {
            return Problem{
                .what = fmt::format("state format {} needs runs that start at a group of elements", name(tile.format)),
                .needed = fmt::format("multiples of {} elements", group_size),
                .available = fmt::format("a run at {} of a tile at {}", run.begin, tile.first_index)};
          });
}

// Threads work on runs at the same time, so no element may belong to two runs.
void check_order(std::span<const Run> runs) {
  for (std::size_t i = 1; i < runs.size(); ++i) {
    const Run& before = runs[i - 1];
    require(before.begin + before.count <= runs[i].begin, Code::bad_argument, [&] {
      return Problem{.what = "the runs of an update overlap, or are not in order",
                     .where = fmt::format("run {}", i),
                     .needed = fmt::format("a beginning at {} or later", before.begin + before.count),
                     .available = fmt::format("{}", runs[i].begin)};
    });
  }
}

}  // namespace

void check_runs(std::span<const Run> runs, std::size_t count) {
  for (const Run& run : runs) {
    check_inside(run, count);
  }
  check_order(runs);
}

void check_update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  check_formats(tile);
  for (const Run& run : runs) {
    check_run(tile, run, groups.size());
    if (run.count > 0) {
      check_memory(tile, groups[run.group].rule);
    }
  }
  check_order(runs);
}

// --- Block quantization ---

namespace {

void check_blocks(const ConstView& blocks, CodeBits bits, std::size_t count) {
  check_size(blocks, DType::u8, quantized_bytes(count, bits), "quantized values");
  require(reinterpret_cast<std::uintptr_t>(blocks.data()) % scale_bytes == 0, Code::unaligned, [] {
    return Problem{.what = "cannot use quantized values: their blocks are not aligned",
                   .needed = fmt::format("a multiple of {} bytes", scale_bytes)};
  });
}

}  // namespace

void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_floating(from, "the source of a quantization");
  check_blocks(to.blocks, to.bits, from.count());
  require(!rounding.stochastic || rounding.first_index % group_size == 0, Code::unaligned, [&] {
    return Problem{.what = "cannot round stochastically: the first element does not begin a group",
                   .needed = fmt::format("a first index that is a multiple of {}", group_size),
                   .available = std::to_string(rounding.first_index)};
  });
}

void check_dequantize(const ConstQuantized& from, const View& to) {
  check_floating(to, "the target of a dequantization");
  check_blocks(from.blocks, from.bits, to.count());
}

void check_sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) {
  check_floating(into, "the target of a sum of quantized values");
  require(!from.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot sum quantized arrays", .needed = "one array or more", .available = "none"};
  });
  for (const ConstView& blocks : from) {
    check_blocks(blocks, bits, into.count());
  }
}

}  // namespace ballast::kernels

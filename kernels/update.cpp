#include "kernels/update.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include "kernels/state_math.h"

namespace ballast::kernels {
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

TileMemory part(const TileMemory& tile, std::size_t first, std::size_t count) {
  const auto advance = [](auto* pointer, std::size_t elements) {
    return pointer == nullptr ? nullptr : pointer + elements;
  };
  TileMemory piece = tile;
  piece.parameter = advance(tile.parameter, first * byte_size(tile.parameter_dtype));
  piece.gradient = advance(tile.gradient, first * byte_size(tile.gradient_dtype));
  piece.master = advance(tile.master, first * master_bytes(tile.format));
  piece.momentum = advance(tile.momentum, moment_bytes(tile.format, first));
  piece.variance = advance(tile.variance, moment_bytes(tile.format, first));
  piece.momentum_scales = advance(tile.momentum_scales, first / group_size);
  piece.variance_scales = advance(tile.variance_scales, first / group_size);
  piece.own.first = advance(tile.own.first, first);
  piece.first_index += first;
  piece.count = count;
  return piece;
}

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

}  // namespace ballast::kernels

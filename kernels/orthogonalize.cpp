// The checks of an orthogonalization, and its steps for any device.
#include "kernels/orthogonalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "kernels/checks.h"
#include "kernels/newton_schulz.h"
#include "kernels/runtime/sizes.h"

namespace ballast::kernels {

namespace {

constexpr std::size_t most_steps = 99;  // torch.optim.Muon refuses more

void check_workspace(const View& matrices, const View& workspace, std::size_t needed) {
  require(workspace.bytes() >= needed, Code::wrong_size, [&] {
    return Problem{.what = "cannot orthogonalize matrices: the workspace is too small",
                   .needed = fmt::format("{} bytes", needed),
                   .available = fmt::format("{} bytes", workspace.bytes()),
                   .remedy = "pass a workspace of workspace_bytes() bytes"};
  });
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  require(address % workspace_alignment == 0, Code::unaligned, [&] {
    return Problem{.what = "cannot orthogonalize matrices: the workspace is not aligned",
                   .needed = fmt::format("a multiple of {} bytes", workspace_alignment),
                   .available = fmt::format("address {:#x}", address)};
  });
  const std::less<> before;
  const bool apart = !before(workspace.data(), matrices.data() + matrices.bytes()) ||
                     !before(matrices.data(), workspace.data() + workspace.bytes());
  require(apart, Code::bad_argument, [] {
    return Problem{.what = "cannot orthogonalize matrices: they overlap the workspace", .needed = "memory apart"};
  });
}

void check_steps(const NewtonSchulz& how) {
  require(how.steps.size() <= most_steps, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot orthogonalize matrices in {} steps", how.steps.size()),
                   .needed = fmt::format("at most {}", most_steps)};
  });
  const bool finite = std::ranges::all_of(
      how.steps, [](const Quintic& q) { return std::isfinite(q.a) && std::isfinite(q.b) && std::isfinite(q.c); });
  require(finite && how.eps >= 0.0f && how.norm_factor > 0.0f, Code::bad_argument, [&] {
    return Problem{.what = "cannot orthogonalize matrices with these options",
                   .needed = "finite coefficients, eps of at least 0 and a norm factor above 0",
                   .available = fmt::format("eps {}, norm factor {}", how.eps, how.norm_factor)};
  });
}

}  // namespace

void Orthogonalizer::operator()(const View& matrices, const MatrixShape& shape, const NewtonSchulz& how,
                                const View& workspace) {
  check_size(matrices, DType::bf16, shape.elements(), "the matrices of an orthogonalization");
  check_steps(how);
  if (shape.elements() == 0) return;
  check_workspace(matrices, workspace, workspace_bytes(shape));
  run(reinterpret_cast<std::uint16_t*>(matrices.data()), shape, how, workspace.data());
}

namespace {

struct Parts {
  std::size_t other;
  std::size_t gram;
  std::size_t update;
  std::size_t squares;
  std::size_t rest;
};

Parts parts_of(const MatrixShape& shape) {
  const std::size_t side = std::min(shape.rows, shape.columns);
  const auto after = [](std::size_t offset, std::size_t bytes) {
    return round_up(offset + bytes, workspace_alignment);
  };
  const std::size_t square_bytes = side * side * shape.count * sizeof(std::uint16_t);
  Parts parts{};
  parts.gram = after(parts.other, shape.elements() * sizeof(std::uint16_t));
  parts.update = after(parts.gram, square_bytes);
  parts.squares = after(parts.update, square_bytes);
  parts.rest = after(parts.squares, shape.count * sizeof(ExactSum));
  return parts;
}

// A step of matrices X, all of which are wide or tall. gram is X X^T where X is wide, and X^T X where it is tall: that is how
// torch transposes tall matrices, without moving an element.
class StepProducts {
 public:
  StepProducts(const MatrixShape& shape, const NewtonSchulzMemory& memory)
      : shape_(shape), memory_(memory), is_tall_(shape.rows > shape.columns) {}

  Product gram(const std::uint16_t* from) const {
    const Factor x{from, shape_.columns, 1};
    return {.rows = side(),
            .inner = std::max(shape_.rows, shape_.columns),
            .columns = side(),
            .count = shape_.count,
            .left = is_tall_ ? transposed(x) : x,
            .right = is_tall_ ? x : transposed(x),
            .to = memory_.gram,
            .symmetric = true};
  }

  Product update(const Quintic& step) const {
    const Factor gram{memory_.gram, side(), 1};
    return {.rows = side(),
            .inner = side(),
            .columns = side(),
            .count = shape_.count,
            .left = gram,
            .right = gram,
            .to = memory_.update,
            .added = memory_.gram,
            .alpha = step.c,
            .beta = step.b,
            .symmetric = true};
  }

  Product next(const std::uint16_t* from, const Quintic& step, std::uint16_t* to) const {
    const Factor x{from, shape_.columns, 1};
    const Factor update{memory_.update, side(), 1};
    return {.rows = shape_.rows,
            .inner = side(),
            .columns = shape_.columns,
            .count = shape_.count,
            .left = is_tall_ ? x : update,
            .right = is_tall_ ? update : x,
            .to = to,
            .added = from,
            .beta = step.a};
  }

 private:
  std::size_t side() const { return std::min(shape_.rows, shape_.columns); }

  const MatrixShape& shape_;
  const NewtonSchulzMemory& memory_;
  bool is_tall_;
};

}  // namespace

NewtonSchulzMemory newton_schulz_memory(const MatrixShape& shape, std::byte* workspace) {
  const Parts parts = parts_of(shape);
  const auto matrix_at = [&](std::size_t offset) { return reinterpret_cast<std::uint16_t*>(workspace + offset); };
  return {.other = matrix_at(parts.other),
          .gram = matrix_at(parts.gram),
          .update = matrix_at(parts.update),
          .squares = reinterpret_cast<ExactSum*>(workspace + parts.squares),
          .rest = workspace + parts.rest};
}

std::size_t newton_schulz_bytes(const MatrixShape& shape) { return parts_of(shape).rest; }

std::size_t workspace_bytes(const MatrixShape& shape, bool on_gpu) {
  return newton_schulz_bytes(shape) + (on_gpu ? cublas_workspace_bytes : 0);
}

double operations_of_step(const MatrixShape& shape) {
  const auto side = static_cast<double>(std::min(shape.rows, shape.columns));
  return 2 * side * (2 * static_cast<double>(shape.elements()) + side * side * static_cast<double>(shape.count));
}

void newton_schulz(std::uint16_t* matrices, const MatrixShape& shape, const NewtonSchulz& how,
                   const NewtonSchulzMemory& memory, MatrixWork& work) {
  const StepProducts products(shape, memory);
  std::uint16_t* from = how.steps.size() % 2 == 0 ? matrices : memory.other;  // the last step then writes `matrices`
  std::uint16_t* to = how.steps.size() % 2 == 0 ? memory.other : matrices;
  work.normalize(matrices, shape, {how.norm_factor, how.eps}, memory.squares, from);
  for (const Quintic& step : how.steps) {
    work.multiply(products.gram(from));
    work.multiply(products.update(step));
    work.multiply(products.next(from, step, to));
    std::swap(from, to);
  }
}

}  // namespace ballast::kernels

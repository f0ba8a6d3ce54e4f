// The checks of an orthogonalization, and its steps for any device.
#include "kernels/orthogonalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "kernels/checks.h"
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

// Offsets in the workspace: of matrices, with `count` of the shape in each place, and of the squares of their norms.
struct Parts {
  std::size_t other = 0;   // the other matrices, as many: a step reads the one and writes the other
  std::size_t gram = 0;    // X X^T of the shorter side
  std::size_t update = 0;  // b gram + c gram^2
  std::size_t squares = 0;
  std::size_t rest = 0;
};

Parts parts_of(const MatrixShape& shape) {
  const std::size_t side = std::min(shape.rows, shape.columns);
  const auto after = [](std::size_t offset, std::size_t bytes) {
    return round_up(offset + bytes, workspace_alignment);
  };
  const std::size_t square_bytes = side * side * shape.count * sizeof(std::uint16_t);
  Parts parts;
  parts.gram = after(parts.other, shape.elements() * sizeof(std::uint16_t));
  parts.update = after(parts.gram, square_bytes);
  parts.squares = after(parts.update, square_bytes);
  parts.rest = after(parts.squares, shape.count * sizeof(ExactSum));
  return parts;
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

// All matrices X are wide or tall. gram is X X^T where X is wide, and X^T X where it is tall: that is how torch transposes tall
// matrices, without moving an element.
void Orthogonalizer::run(std::uint16_t* matrices, const MatrixShape& shape, const NewtonSchulz& how,
                         std::byte* workspace) {
  const Parts parts = parts_of(shape);
  const auto matrices_at = [&](std::size_t offset) { return reinterpret_cast<std::uint16_t*>(workspace + offset); };
  std::uint16_t* const gram = matrices_at(parts.gram);
  std::uint16_t* const update = matrices_at(parts.update);
  std::uint16_t* from = matrices;
  std::uint16_t* to = matrices_at(parts.other);
  if (how.steps.size() % 2 == 1) std::swap(from, to);  // the last step then writes `matrices`
  begin(workspace + parts.rest);
  normalize(matrices, shape, {how.norm_factor, how.eps}, reinterpret_cast<ExactSum*>(workspace + parts.squares), from);
  const bool is_tall = shape.rows > shape.columns;
  const std::size_t side = std::min(shape.rows, shape.columns);
  const Factor by_gram{gram, side, 1}, by_update{update, side, 1};
  for (const Quintic& step : how.steps) {
    const Factor x{from, shape.columns, 1};
    multiply({.rows = side,
              .inner = shape.rows + shape.columns - side,
              .columns = side,
              .count = shape.count,
              .left = is_tall ? transposed(x) : x,
              .right = is_tall ? x : transposed(x),
              .to = gram,
              .symmetric = true});
    multiply({.rows = side,
              .inner = side,
              .columns = side,
              .count = shape.count,
              .left = by_gram,
              .right = by_gram,
              .to = update,
              .added = gram,
              .alpha = step.c,
              .beta = step.b,
              .symmetric = true});
    multiply({.rows = shape.rows,
              .inner = side,
              .columns = shape.columns,
              .count = shape.count,
              .left = is_tall ? x : by_update,
              .right = is_tall ? by_update : x,
              .to = to,
              .added = from,
              .beta = step.a});
    std::swap(from, to);
  }
}

std::size_t workspace_bytes(const MatrixShape& shape, bool on_gpu) {
  return parts_of(shape).rest + (on_gpu ? cublas_workspace_bytes : 0);
}

double operations_of_step(const MatrixShape& shape) {
  const auto side = static_cast<double>(std::min(shape.rows, shape.columns));
  return 2 * side * (2 * static_cast<double>(shape.elements()) + side * side * static_cast<double>(shape.count));
}

}  // namespace ballast::kernels

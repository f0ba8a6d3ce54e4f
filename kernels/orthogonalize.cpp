#include "kernels/orthogonalize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/checks.h"

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

}  // namespace ballast::kernels

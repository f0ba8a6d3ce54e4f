#include "zero/engine/first_failure.h"

#include <ballast/error.h>

#include <fmt/format.h>

namespace ballast {
namespace {

[[noreturn]] void rethrow_from(const Op& op, const Model& model) {
  try {
    throw;
  } catch (const Error& error) {
    const std::string unit = op.unit == none ? "" : fmt::format("unit {}, ", model.units[op.unit].name);
    Problem problem = error.problem();
    problem.where = fmt::format("{}{} of {}{}{}", unit, name(op.kind), name(op.phase),
                                problem.where.empty() ? "" : "; ", problem.where);
    fail(error.code(), problem);
  }
}

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

void FirstFailure::check() const {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void FirstFailure::fail(const Op& op) {
  exchanges_.cancel();
  {
    const std::lock_guard lock(mutex_);
    if (error_) throw;  // this operation waited for the one that failed, or was aborted with it
  }
  try {
    rethrow_from(op, model_);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    mesh_.abort(text_of_current_exception());
    throw;
  }
}

}  // namespace ballast

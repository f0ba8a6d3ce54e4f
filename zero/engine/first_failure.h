// Keeps the first error of any lane, and ends the step on all ranks.
#pragma once

#include <exception>
#include <mutex>

#include "zero/engine/exchange_order.h"
#include "zero/engine/mesh.h"
#include "zero/plan/program.h"

namespace ballast {

// Any thread may call.
class FirstFailure {
 public:
  FirstFailure(const Model& model, Mesh& mesh, ExchangeTurns& exchanges)
      : model_(model), mesh_(mesh), exchanges_(exchanges) {}

  void check() const;  // throws the first error, if there is one

  // Called only while an exception is handled; rethrows it. For the first one it adds the operation, and aborts the
  // peers' communicators, so that no rank waits for this one. Later ones follow from the first and are only rethrown.
  [[noreturn]] void fail(const Op& op);

 private:
  const Model& model_;
  Mesh& mesh_;
  ExchangeTurns& exchanges_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace ballast

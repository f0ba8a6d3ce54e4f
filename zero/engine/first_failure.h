// Keeps the first error of any lane, and ends the step on all ranks.
#pragma once

#include <exception>
#include <mutex>

#include "zero/engine/mesh.h"
#include "zero/engine/sequencer.h"
#include "zero/plan/program.h"

namespace ballast {

// Any thread may call.
class FirstFailure {
 public:
  FirstFailure(const Model& model, Mesh& mesh, Sequencer& sequencer)
      : model_(model), mesh_(mesh), sequencer_(sequencer) {}

  void check() const;  // throws the first error, if there is one

  // Only while an exception is handled: rethrows it, the first one with its operation. The first one also aborts the peers'
  // communicators, so that no rank waits for this one; those that follow from it are only rethrown.
  [[noreturn]] void fail(const Op& op);

 private:
  const Model& model_;
  Mesh& mesh_;
  Sequencer& sequencer_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace ballast

// A rank's records on its drives: made new or found again, and then of the same step on all ranks.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "offload/record_store.h"
#include "offload/run_directory.h"
#include "zero/comm/communicator.h"
#include "zero/plan/plan.h"

namespace ballast {

struct RecordOptions {
  std::vector<std::filesystem::path> directories{};  // of one or several drives
  // What is kept has a name. Without one, files have none, hold only what is not in memory, and are gone with the process.
  std::string run{};
  std::size_t depth = 16;  // requests at once, of each drive
  bool allow_network = false;
  Log* log = nullptr;  // outlives the records
};

// Used by one thread at a time. All ranks make theirs together.
class Records {
 public:
  // Opens the newest step that all ranks have, if the run has begun; else makes new files.
  Records(const Plan& plan, Communicator& world, const RecordOptions& options);

  offload::RecordStore& store() { return *store_; }
  std::vector<offload::IoQueue*> queues() const;
  bool found() const { return found_; }

 private:
  void go_to_common_step(const offload::RecordShape& shape, Communicator& world, const offload::StoreOptions& options);

  std::vector<offload::RunDirectory> kept_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  std::vector<offload::Drive> drives_;
  std::optional<offload::RecordStore> store_;
  bool found_ = false;
};

}  // namespace ballast

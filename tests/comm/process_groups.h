// Ranks that are real processes. A test forks them, they find each other through a store of files, and none outlives
// it.
#pragma once

#include <sys/types.h>

#include "tests/comm/test_groups.h"
#include "tests/temporary_directory.h"
#include "zero/comm/connect.h"

namespace ballast::testing {

// A store that keeps each key in a file.
class FileStore : public KeyValueStore {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;

 private:
  std::filesystem::path path(std::string key) const;
  std::filesystem::path folder_;
};

// Children of this process, each running `body(rank)`, which may throw. No other thread may run here when it is made.
class Processes {
 public:
  Processes(std::size_t size, const std::function<void(std::size_t rank)>& body);
  ~Processes();  // kills those that still run
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  std::size_t size() const { return children_.size(); }
  pid_t process(std::size_t rank) const { return children_[rank].pid; }
  void send(std::size_t rank, int signal) const;
  std::string failure(std::size_t rank);  // waits for its end: what it threw, "signal 9", or nothing
  Failures failures();

 private:
  struct Child {
    pid_t pid;
    int output;
  };
  std::vector<Child> children_;
};

struct ProcessKind {
  std::string name;
  HostTransport transport;
};

std::vector<ProcessKind> process_kinds();  // those that this build has

// The rendezvous of processes, and the transport that connects them.
class ProcessGroupRig {
 public:
  ProcessGroupRig(GroupShape shape, HostTransport transport, std::chrono::milliseconds timeout)
      : shape_(shape), transport_(transport), timeout_(timeout) {}

  // Connects this process.
  void as_rank(std::size_t rank, const RankBody& body) const { as_rank(rank, timeout_, body); }
  void as_rank(std::size_t rank, std::chrono::milliseconds timeout, const RankBody& body) const;

 private:
  TemporaryDirectory folder_;
  GroupShape shape_;
  HostTransport transport_;
  std::chrono::milliseconds timeout_;
};

}  // namespace ballast::testing

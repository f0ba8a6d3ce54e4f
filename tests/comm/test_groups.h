// Every kind of group of ranks that this build has, and functions that run a body on all ranks of one.
#pragma once

#include <ballast/comm.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace ballast::testing {

using RankBody = std::function<void(Communicator& ranks)>;

// Each rank's error, or an empty string.
using Failures = std::vector<std::string>;

// The ranks of a group, of which some count as one host in the order of sums.
struct GroupShape {
  std::size_t size = 1;
  std::size_t ranks_per_host = 1;
  GroupShape(std::size_t ranks, std::size_t of_host = 1) : size(ranks), ranks_per_host(of_host) {}
};

struct GroupKind {
  std::string name;
  std::function<Failures(GroupShape shape, std::chrono::milliseconds timeout, const RankBody& body)> run;
};

std::vector<GroupKind> group_kinds();

inline constexpr std::chrono::milliseconds patient = std::chrono::minutes(1);

// Runs `body` on every rank of every kind of group of this shape; no rank may fail.
void on_all_groups(GroupShape shape, const RankBody& body);

// Throws if `holds` is false. Catch's checks do not work on ranks, which are other threads or processes.
void expect(bool holds, const std::string& what);

}  // namespace ballast::testing

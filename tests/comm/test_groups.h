// Every kind of group of ranks that there is here, and a way to run something on all ranks of one.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "zero/comm/communicator.h"

namespace ballast::testing {

using RankBody = std::function<void(Communicator& ranks)>;

// By rank: what it failed with, or nothing.
using Failures = std::vector<std::string>;

struct GroupKind {
  std::string name;
  std::function<Failures(std::size_t size, std::chrono::milliseconds timeout, const RankBody& body)> run;
};

std::vector<GroupKind> group_kinds();

inline constexpr std::chrono::milliseconds patient = std::chrono::minutes(1);

// Runs it on every rank of every kind of group of the size; no rank may fail.
void on_all_groups(std::size_t size, const RankBody& body);

// Ranks are threads or processes, where Catch's checks do not reach: what does not hold is thrown.
void expect(bool holds, const std::string& what);

}  // namespace ballast::testing

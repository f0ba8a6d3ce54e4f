// What all ranks of a group tell each other as text, and work that succeeds on all of them or fails on all.
#pragma once

#include <ballast/comm.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace ballast {

// Returns the text of every rank, in rank order. All ranks call it together.
std::vector<std::string> texts_of_all(Communicator& world, const std::string& mine);

// Returns the text of rank `root`. All ranks call it together.
std::string broadcast_text(Communicator& world, const std::string& mine, std::size_t root);

std::vector<std::string> lines_of(const std::string& text);

// Does `work` on this rank and returns when all ranks have done theirs. If it fails on any rank, every rank throws the
// error of the lowest failed rank, with its number: no rank waits for one that failed. All ranks of the group call.
void on_all_ranks(Communicator& world, const std::function<void()>& work);

// Refuse (B1001) options, by name and in one order, and lines that describe parameters, of which a rank has others than rank 0.
// All ranks call together and throw the same. Ranks exchange digests, and the texts only if those differ.
using NamedValue = std::pair<std::string, std::string>;
void require_same_options(Communicator& world, const std::vector<NamedValue>& mine);
void require_same_parameters(Communicator& world, const std::vector<std::string>& mine);

}  // namespace ballast

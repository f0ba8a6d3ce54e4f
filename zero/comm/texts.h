// Texts of different lengths that ranks tell each other.
#pragma once

#include <ballast/comm.h>

#include <string>
#include <vector>

namespace ballast {

// Returns the text of every rank, in rank order. All ranks call it together.
std::vector<std::string> texts_of_all(Communicator& world, const std::string& mine);

// Returns the text of rank `root`. All ranks call it together.
std::string broadcast_text(Communicator& world, const std::string& mine, std::size_t root);

std::vector<std::string> lines_of(const std::string& text);

}  // namespace ballast

// The names of a training's tensors and rule in files. Pure functions of values, the same on every rank.
#pragma once

#include <ballast/model.h>
#include <ballast/optim.h>

#include <string>
#include <vector>

namespace ballast {

std::string describe(const optim::Rule& rule);  // its kind, and how many values of its own it keeps

// A name for each tensor, by unit, that is the same for any number of ranks and in any units: its own if no other tensor of
// the model has it, else that of its unit and its own.
std::vector<std::vector<std::string>> names_in_runs(const Model& model);
// The same. Throws B1005 if ranks have other parts of a unit, whose tensors would share names in the files of all ranks.
std::vector<std::vector<std::string>> names_of_whole_units(const Model& model);

}  // namespace ballast

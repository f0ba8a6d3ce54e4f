// The output of the program, as text. Pure.
#pragma once

#include <span>
#include <string>

#include "examples/gpt/run.h"

namespace ballast::gpt {

std::string beginning(const RunOptions& options, const Start& start);
std::string step_heading();
std::string step_line(const Step& step);
std::string ending(std::span<const Step> steps, const RunOptions& options, const Start& start);

std::string json_line(const Step& step, const RunOptions& options, const Start& start);
std::string exact_line(const Step& step);  // with the bits of loss and norm

}  // namespace ballast::gpt

// The command line of the program.
#pragma once

#include <CLI/CLI.hpp>

#include "benchmarks/training/run.h"

namespace ballast::benchmarks {

struct ProgramOptions {
  RunOptions run{};
  std::size_t ranks = 1;  // threads of this process
  bool on_gpu = false;    // rank r on the GPU r of its machine
  int threads = 0;        // threads of each rank; 0: its share of the cores
  std::filesystem::path timeline{};
  std::filesystem::path losses{};
  std::filesystem::path json{};
  std::filesystem::path save{};
};

// Sets what a model of this width and these heads leaves out: the widths of heads and MLPs, and the heads of keys and values.
void complete(llama::Config& model);

void describe(CLI::App& app, ProgramOptions& options);

}  // namespace ballast::benchmarks

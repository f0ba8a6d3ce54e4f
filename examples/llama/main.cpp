// Trains a Llama of the Hugging Face Hub, or a new one, at any stage and tier.
#include <ballast/safetensors.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "examples/llama/run.h"
#include "examples/llama/tokens.h"

namespace ballast::llama {
namespace {

struct Options : TrainerOptions {
  std::filesystem::path folder{};
  std::vector<std::filesystem::path> text{};
  bool begins_new = false;
  std::filesystem::path checkpoint{}, save{}, losses{};
};

void describe_program(CLI::App& app, Options& o) {
  o.training.stage = 3;
  o.training.max_norm = 1.0;
  o.rule.lr = 1e-5;
  o.steps = 100;
  o.seed = 0;
  app.add_option("model", o.folder, "A folder with config.json and *.safetensors")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("text", o.text, "Files of tokens (.bin), or text whose bytes are the tokens")
      ->required()
      ->take_all()
      ->check(CLI::ExistingFile);
  app.add_flag("--new", o.begins_new, "Begin with random values; the folder needs config.json only");
  app.add_option("--checkpoint", o.checkpoint, "A directory: continue from its checkpoint, and save one at the end");
  app.add_option("--save", o.save, "Write the trained model to this folder, for transformers");
  app.add_option("--losses", o.losses, "Write the losses and norms of the steps with all their bits");
  describe(app, o);
}

// Writes the weights, and copies the configuration and the tokenizer next to them.
void save_model(const Options& o, Communicator& world, Training& training) {
  safetensors::write(o.save, training);
  if (world.rank() != 0) return;
  for (const auto& file : std::filesystem::directory_iterator(o.folder)) {
    const std::string suffix = file.path().extension(), name = file.path().filename();
    const bool is_index = name.find(".safetensors") != std::string::npos;
    if (file.is_regular_file() && !is_index && (suffix == ".json" || suffix == ".model" || suffix == ".txt"))
      std::filesystem::copy_file(file, o.save / name, std::filesystem::copy_options::overwrite_existing);
  }
}

void print(const Options& o, const StepResult& result, double loss, double tokens_per_second) {
  std::printf("loss %.4f  %.0f tokens/s  %s\n", loss, tokens_per_second, to_text(result).c_str());
  std::fflush(stdout);
  if (o.losses.empty()) return;
  std::ofstream file(o.losses, std::ios::app);
  file << result.step << ' ' << std::hexfloat << loss << ' ' << result.norm << '\n';
}

void train(Options o, Communicator& world) {
  o.model = read_config(o.folder);
  const TokenFiles text(o.text);
  const auto maths = maths_of(o, world);
  complete(o, *maths);
  Llama llama(o.model, o.batch, *maths);
  Training training(llama.model(), world, rules_of(o), o.training);
  training.start(o.begins_new ? initial_values(llama.model(), o.seed)
                              : safetensors::Source(o.folder).parameters(llama.model()));
  if (!o.checkpoint.empty() && !training.found()) (void)training.load(o.checkpoint);  // if there is one
  const auto tokens = static_cast<double>(o.training.micro_steps * o.batch.positions() * world.size());
  if (world.rank() == 0) {
    std::printf("%.1f million parameters, %s, stage %d, %zu ranks, %.0f tokens a step\n",
                static_cast<double>(parameters_of(llama.model())) / 1e6, maths->library().c_str(), o.training.stage,
                world.size(), tokens);
  }
  const Draw draw = [&](std::uint64_t key) { return text.draw(key, o.batch.sequences, o.batch.context + 1); };
  while (training.steps() < o.steps) {
    const auto begin = std::chrono::steady_clock::now();
    const double loss = run_micro_steps(llama, training, o, world.rank(), draw);
    const StepResult result = training.step();
    const double mean = world.mean(loss);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (world.rank() == 0) print(o, result, mean, tokens / seconds.count());
  }
  training.finish();
  if (!o.checkpoint.empty()) training.save(o.checkpoint);
  if (!o.save.empty()) save_model(o, world, training);
}

}  // namespace
}  // namespace ballast::llama

int main(int argc, char** argv) {
  CLI::App app{"Trains a Llama or a Qwen with Ballast"};
  ballast::llama::Options options;
  ballast::llama::describe_program(app, options);
  CLI11_PARSE(app, argc, argv);
  return ballast::run_ranks(options.ranks,
                            [&](ballast::Communicator& world) { ballast::llama::train(options, world); });
}

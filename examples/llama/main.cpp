// Trains a Llama of the Hugging Face Hub, or a new one, at any stage and tier.
#include <ballast/comm.h>
#include <ballast/error.h>
#include <ballast/safetensors.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>

#include "examples/llama/llama.h"
#include "examples/llama/noise.h"
#include "examples/llama/tokens.h"

namespace ballast::llama {
namespace {

struct Options {
  std::filesystem::path model{};
  std::vector<std::filesystem::path> text{};
  Batch batch{};
  TrainingOptions training{.stage = 3, .max_norm = 1.0};
  optim::AdamW rule{.lr = 1e-5, .beta2 = 0.95, .weight_decay = 0.1};
  std::uint64_t steps = 100;
  std::uint64_t seed = 0;
  std::size_t ranks = 1;
  bool begins_new = false;
  bool on_gpu = false;
  std::filesystem::path checkpoint{}, save{}, losses{};
};

void describe_placement(CLI::App& app, Options& o) {
  const std::map<std::string, Tier> tiers{{"device", Tier::device}, {"host", Tier::host}, {"nvme", Tier::nvme}};
  const auto tier = [&](const char* option, Spread& to, const char* text) {
    app.add_option_function<std::string>(
           option, [&to, tiers](const std::string& name) { to = tiers.at(name); }, text)
        ->check(CLI::IsMember(tiers));
  };
  std::map<std::string, StateFormat> formats;
  for (const StateFormat format : all_state_formats)
    formats.emplace(name(format), format);
  app.add_option("--stage", o.training.stage, "ZeRO stage")->capture_default_str()->check(CLI::Range(0, 3));
  tier("--parameters", o.training.parameters, "Tier of the parameters: device, host or nvme");
  tier("--gradients", o.training.gradients, "Tier of the reduced gradients");
  tier("--state", o.training.state, "Tier of the optimizer state");
  app.add_option_function<std::string>(
         "--state-format", [&o, formats](const std::string& name) { o.training.format = formats.at(name); },
         "Format of the optimizer state of bf16 parameters")
      ->check(CLI::IsMember(formats));
  app.add_flag_callback(
      "--update-in-backward",
      [&o] {
        o.training.schedule.update_in_backward = true;
        o.training.max_norm = optim::no_clipping;
      },
      "Update a unit as soon as its gradients are reduced: less memory, and nothing is clipped");
  app.add_flag("--layer-major", o.training.schedule.layer_major,
               "Let all micro-steps go through a layer before the next layer, so that its parameters are read once");
  app.add_flag("--borders-on-host", o.batch.borders_on_host, "Keep the inputs of layers in host memory (GPUs)");
  app.add_option("--staging", o.training.schedule.staging_slots, "Tiles in flight from and to drives")
      ->capture_default_str();
  app.add_option("--drive", o.training.drives.directories, "A directory on a drive for the tier nvme; can be repeated")
      ->take_all()
      ->check(CLI::ExistingDirectory);
  app.add_option("--run", o.training.drives.run,
                 "A name: all state stays on the drives, and a run of this name is resumed");
}

void describe(CLI::App& app, Options& o) {
  app.option_defaults()->take_last();
  app.add_option("model", o.model, "A folder with config.json and *.safetensors")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("text", o.text, "Files of tokens (.bin), or text whose bytes are the tokens")
      ->required()
      ->take_all()
      ->check(CLI::ExistingFile);
  app.add_flag("--new", o.begins_new, "Begin with random values; the folder needs config.json only");
  app.add_option("--steps", o.steps, "Steps in all, including those before a restart")->capture_default_str();
  app.add_option("--context", o.batch.context, "Tokens of a sequence")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--batch", o.batch.sequences, "Sequences of a micro-step on each rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--chunk", o.batch.chunk, "Positions whose logits are in memory at once")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--micro-steps", o.training.micro_steps, "Micro-steps of a step")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--lr", o.rule.lr, "Learning rate of AdamW")->capture_default_str();
  app.add_option("--weight-decay", o.rule.weight_decay, "Weight decay of matrices")->capture_default_str();
  app.add_option("--max-norm", o.training.max_norm, "Clip gradients to this norm")->capture_default_str();
  app.add_option("--seed", o.seed, "Seed of new values and of the sequences that are drawn")->capture_default_str();
  app.add_option("--checkpoint", o.checkpoint, "A directory: continue from its checkpoint, and save one at the end");
  app.add_option("--save", o.save, "Write the trained model to this folder, for transformers");
  app.add_option("--losses", o.losses, "Write the losses and norms of the steps with all their bits");
  app.add_option("--ranks", o.ranks, "Ranks, as threads of this process, where no launcher starts them")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--threads", o.training.threads, "CPU threads of a rank (default: its share of the cores)");
  app.add_flag("--gpu", o.on_gpu, "Compute on GPUs: rank r on the GPU r of its machine");
  describe_placement(app, o);
}

// Writes the weights, and copies the configuration and the tokenizer next to them.
void save_model(const Options& o, Communicator& world, Training& training) {
  safetensors::write(o.save, training);
  if (world.rank() != 0) return;
  for (const auto& file : std::filesystem::directory_iterator(o.model)) {
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

void train(const Options& o, Communicator& world) {
  const Config config = read_config(o.model);
  const TokenFiles text(o.text);
  TrainingOptions options = o.training;
  if (options.threads == 0)
    options.threads = static_cast<int>(std::max<std::size_t>(1, std::thread::hardware_concurrency() / world.size()));
  const auto maths = o.on_gpu ? gpu_maths(world.rank()) : cpu_maths(options.threads);
  options.gpu = maths->gpu();
  options.stream = maths->stream();
  const std::size_t micro_steps = options.micro_steps;
  Batch batch = o.batch;
  if (options.schedule.layer_major) batch.together = micro_steps;
  Llama llama(config, batch, *maths);
  options.trace = trace_of(config);
  optim::AdamW undecayed = o.rule;
  undecayed.weight_decay = 0.0;
  Training training(llama.model(), world, {{"matrices", o.rule}, {"vectors", undecayed}}, options);
  training.start(o.begins_new ? initial_values(llama.model(), o.seed)
                              : safetensors::Source(o.model).parameters(llama.model()));
  if (!o.checkpoint.empty() && !training.found()) (void)training.load(o.checkpoint);  // if there is one
  const auto tokens = static_cast<double>(micro_steps * o.batch.positions() * world.size());
  if (world.rank() == 0) {
    std::printf("%.1f million parameters, %s, stage %d, %zu ranks, %.0f tokens a step\n",
                static_cast<double>(parameters_of(llama.model())) / 1e6, maths->library().c_str(), options.stage,
                world.size(), tokens);
  }
  while (training.steps() < o.steps) {
    const auto begin = std::chrono::steady_clock::now();
    double loss = 0;
    std::vector<std::uint32_t> drawn;
    for (std::size_t micro = 0; micro < micro_steps; ++micro) {
      const std::uint64_t key = noise({o.seed, training.steps(), micro, world.rank()});
      const std::vector<std::uint32_t> more = text.draw(key, batch.sequences, batch.context + 1);
      drawn.insert(drawn.end(), more.begin(), more.end());
      if ((micro + 1) % batch.together > 0) continue;
      loss += llama.run(training, drawn);
      drawn.clear();
    }
    const StepResult result = training.step();
    const double mean = world.mean(loss / static_cast<double>(micro_steps));
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
  ballast::llama::describe(app, options);
  CLI11_PARSE(app, argc, argv);
  return ballast::run_ranks(options.ranks,
                            [&](ballast::Communicator& world) { ballast::llama::train(options, world); });
}

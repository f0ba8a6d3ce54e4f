#include "examples/llama/run.h"

#include <ballast/error.h>

#include <CLI/CLI.hpp>
#include <map>
#include <thread>

#include "examples/llama/noise.h"

namespace ballast::llama {
namespace {

std::size_t tier_from(const std::string& text) {
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (text == name(static_cast<Tier>(tier))) return tier;
  }
  fail(Code::bad_argument, {.what = "there is no tier \"" + text + "\"", .needed = "device, host or nvme"});
}

// "host", or fractions: "device=0.3,host=0.7".
Spread spread_from(const std::string& text) {
  if (text.find('=') == std::string::npos) return all_in(static_cast<Tier>(tier_from(text)));
  std::array<double, tier_count> fractions{};
  for (const std::string& part : CLI::detail::split(text, ',')) {
    const std::size_t sign = part.find('=');
    const std::size_t tier = tier_from(part.substr(0, sign));
    const bool is_number =
        sign != std::string::npos && CLI::detail::lexical_cast(part.substr(sign + 1), fractions[tier]);
    require(is_number, Code::bad_argument, [&] {
      return Problem{.what = "cannot read \"" + part + "\" as a fraction of a tier", .needed = "such as host=0.5"};
    });
  }
  return {fractions[0], fractions[1], fractions[2]};
}

// Adds a choice by name. CLI11's own transformer would show the values of the enumeration in --help.
template <class Value, class Values>
void add_choice(CLI::App& app, const std::string& option, Value& to, const Values& values, const std::string& text) {
  std::map<std::string, Value> by_name;
  for (const Value value : values)
    by_name.emplace(name(value), value);
  app.add_option_function<std::string>(
         option, [&to, by_name](const std::string& word) { to = by_name.at(word); }, text)
      ->check(CLI::IsMember(by_name));
}

void describe_placement(CLI::App& app, TrainingOptions& training) {
  const auto spread = [&](const char* option, Spread& to, const char* text) {
    app.add_option_function<std::string>(
        option, [&to](const std::string& tier) { to = spread_from(tier); }, text);
  };
  app.add_option("--stage", training.stage, "ZeRO stage")->check(CLI::Range(0, 3));
  spread("--parameters", training.parameters, "Tier of the parameters: device, host, nvme, or device=0.3,host=0.7");
  spread("--gradients", training.gradients, "Tier of the reduced gradients");
  spread("--state", training.state, "Tier of the optimizer state");
  add_choice(app, "--state-format", training.format, all_state_formats,
             "Format of the optimizer state of bf16 parameters");
  add_choice(app, "--gradient-format", training.gradient_format, std::array{GradientFormat::fp32, GradientFormat::bf16},
             "Format of the reduced gradients of bf16 parameters");
  app.add_option("--drive", training.drives.directories, "A directory on a drive for the tier nvme; can be repeated")
      ->take_all()
      ->check(CLI::ExistingDirectory);
  app.add_option("--run", training.drives.run,
                 "A name: all state stays on the drives, and a run of this name is resumed");
  app.add_flag("--mirror", training.drives.mirror, "Keep the run's records on a drive of another rank too");
  app.add_option("--prefetch", training.schedule.prefetch, "Units to gather ahead");
  app.add_option("--tile", training.tile_elements, "Elements to update, read and write at a time; 0: Ballast chooses")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::PositiveNumber);
  app.add_option("--staging", training.schedule.staging_slots, "Tiles in flight from and to drives");
  app.add_flag("--layer-major", training.schedule.layer_major,
               "Let all micro-steps go through a layer before the next layer, so that its parameters are read once");
}

}  // namespace

void describe(CLI::App& app, TrainerOptions& o) {
  app.option_defaults()->take_last()->always_capture_default();  // options after those of a script replace them
  app.add_option("--steps", o.steps, "Steps in all, including those before a restart");
  app.add_option("--context", o.batch.context, "Tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--batch", o.batch.sequences, "Sequences of a micro-step on each rank")->check(CLI::PositiveNumber);
  app.add_option("--chunk", o.batch.chunk, "Positions whose logits are in memory at once")->check(CLI::PositiveNumber);
  app.add_option("--micro-steps", o.training.micro_steps, "Micro-steps of a step")->check(CLI::PositiveNumber);
  app.add_option("--lr", o.rule.lr, "Learning rate of AdamW");
  app.add_option("--weight-decay", o.rule.weight_decay, "Weight decay of matrices");
  app.add_option("--seed", o.seed, "Seed of new values and of the sequences that are drawn");
  app.add_flag_callback(
      "--update-in-backward",
      [&o] {
        o.training.schedule.update_in_backward = true;
        o.training.max_norm = optim::no_clipping;
      },
      "Update a unit as soon as its gradients are reduced: less memory, and nothing is clipped unless --max-norm is given");
  app.add_option("--max-norm", o.training.max_norm, "Clip gradients to this norm");
  app.add_flag("--borders-on-host", o.batch.borders_on_host, "Keep the inputs of layers in host memory (GPUs)");
  app.add_option("--ranks", o.ranks, "Ranks, as threads of this process, where no launcher starts them")
      ->check(CLI::Range(1, 64));
  app.add_option("--threads", o.training.threads, "CPU threads of each rank; 0: its share of the cores")
      ->check(CLI::Range(0, 1024));
  app.add_flag("--gpu", o.on_gpu, "Compute on GPUs: rank r on the GPU r of its machine");
  describe_placement(app, o.training);
}

std::unique_ptr<Maths> maths_of(TrainerOptions& o, const Communicator& world) {
  require(o.ranks == 1 || o.ranks == world.size(), Code::bad_argument, [&] {
    return Problem{.what = "cannot use --ranks " + std::to_string(o.ranks) + ": a launcher has started " +
                           std::to_string(world.size()) + " ranks",
                   .remedy = "leave --ranks out, or start only one process"};
  });
  const std::size_t share = std::max<std::size_t>(1, std::thread::hardware_concurrency() / world.size());
  if (o.training.threads == 0) o.training.threads = static_cast<int>(share);
  return o.on_gpu ? gpu_maths(world.rank()) : cpu_maths(o.training.threads);
}

void complete(TrainerOptions& o, const Maths& maths) {
  if (o.training.schedule.layer_major) o.batch.together = o.training.micro_steps;
  o.training.gpu = maths.gpu();
  o.training.stream = maths.stream();
  o.training.trace = trace_of(o.model);
}

Groups rules_of(const TrainerOptions& o) {
  optim::AdamW undecayed = o.rule;
  undecayed.weight_decay = 0.0;
  return {{"matrices", o.rule}, {"vectors", undecayed}};
}

double run_micro_steps(Llama& llama, Training& training, const TrainerOptions& o, std::size_t rank, const Draw& draw) {
  double loss = 0;
  std::vector<std::uint32_t> drawn;
  for (std::size_t micro = 0; micro < o.training.micro_steps; ++micro) {
    const std::vector<std::uint32_t> more = draw(noise({o.seed, training.steps(), micro, rank}));
    drawn.insert(drawn.end(), more.begin(), more.end());
    if ((micro + 1) % o.batch.together > 0) continue;
    loss += llama.run(training, drawn);
    drawn.clear();
  }
  return loss / static_cast<double>(o.training.micro_steps);
}

}  // namespace ballast::llama

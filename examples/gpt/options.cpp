#include "examples/gpt/options.h"

#include <fmt/format.h>

#include <map>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/sizes.h"

namespace ballast::gpt {
namespace {

std::size_t tier_from(const std::string& text) {
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (text == name(static_cast<Tier>(tier))) return tier;
  }
  fail(Code::bad_argument, {.what = fmt::format("\"{}\" is no tier", text), .needed = "device, host or nvme"});
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
      return Problem{.what = fmt::format("\"{}\" is no fraction of a tier", part), .needed = "such as host=0.5"};
    });
  }
  return {fractions[0], fractions[1], fractions[2]};
}

// Named by a word. CLI11's own way shows the program's numbers in --help.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& option, Value& to, const std::map<std::string, Value>& values,
                        const std::string& text) {
  const auto choose = [&to, option, values](const std::string& asked) {
    const auto found = values.find(asked);
    require(found != values.end(), Code::bad_argument, [&] {
      std::vector<std::string> names;
      names.reserve(values.size());
      for (const auto& [name, value] : values) {
        names.push_back(name);
      }
      return Problem{.what = fmt::format("{} cannot be \"{}\"", option, asked),
                     .needed = fmt::format("one of {}", fmt::join(names, ", "))};
    });
    to = found->second;
  };
  return app.add_option_function<std::string>(option, choose, text)->type_name("NAME");
}

void describe_model(CLI::App& app, RunOptions& run) {
  const std::map<std::string, DType> formats{{"bf16", DType::bf16}, {"fp32", DType::fp32}};
  Shape& shape = run.shape;
  app.add_option("--layers", shape.layers, "Blocks")->capture_default_str()->group("Model");
  app.add_option("--width", shape.width, "Numbers of a position")->capture_default_str()->group("Model");
  app.add_option("--heads", shape.heads, "Heads of attention")->capture_default_str()->group("Model");
  app.add_option("--context", shape.context, "Bytes of a sequence")->capture_default_str()->group("Model");
  app.add_flag("!--untied", shape.tied, "The head has a weight of its own")->group("Model");
  add_choice(app, "--dtype", shape.dtype, formats, "Of parameters and activations: bf16 (default) or fp32")
      ->group("Model");
}

void describe_steps(CLI::App& app, RunOptions& run) {
  app.add_option("--text", run.text, "Files to learn from, as bytes; without, made-up sentences")
      ->take_all()
      ->check(CLI::ExistingFile)
      ->group("Steps");
  app.add_option("--steps", run.steps, "Steps in all, those before a restart included")
      ->capture_default_str()
      ->group("Steps");
  app.add_option("--batch", run.batch, "Sequences of a micro-step, on each rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber)
      ->group("Steps");
  app.add_option("--micro-steps", run.training.micro_steps, "Backward passes of a step")
      ->capture_default_str()
      ->check(CLI::PositiveNumber)
      ->group("Steps");
  app.add_option("--lr", run.lr, "AdamW's rate")->capture_default_str()->group("Steps");
  app.add_option("--weight-decay", run.weight_decay, "Of matrices and tables")->capture_default_str()->group("Steps");
  app.add_option("--max-norm", run.training.max_norm, "Clip gradients to this norm")->group("Steps");
  app.add_option("--seed", run.seed, "Of first parameters and of what is read")->capture_default_str()->group("Steps");
}

void describe_placement(CLI::App& app, TrainingOptions& training) {
  const std::map<std::string, kernels::StateFormat> formats{{"fp32", kernels::StateFormat::fp32},
                                                            {"split", kernels::StateFormat::split},
                                                            {"bf16", kernels::StateFormat::bf16},
                                                            {"compact", kernels::StateFormat::compact}};
  const auto spread = [&](const char* option, Spread& to, const char* text) {
    app.add_option_function<std::string>(
           option, [&to](const std::string& asked) { to = spread_from(asked); }, text)
        ->type_name("TIER")
        ->group("Memory");
  };
  app.add_option("--stage", training.stage, "ZeRO stage, 0 to 3")
      ->capture_default_str()
      ->check(CLI::Range(0, 3))
      ->group("Memory");
  spread("--parameters", training.parameters, "Where they are kept: device, host, nvme, or device=0.3,host=0.7");
  spread("--gradients", training.gradients, "The same, for reduced gradients");
  spread("--state", training.state, "The same, for the optimizer's state");
  add_choice(app, "--format", training.format, formats,
             "Of the optimizer's state: fp32, split (default), bf16 or compact")
      ->group("Memory");
  app.add_option("--drive", training.drives.directories, "A directory for what is kept on drives; may be repeated")
      ->take_all()
      ->check(CLI::ExistingDirectory)
      ->group("Memory");
  app.add_option("--run", training.drives.run, "The run's name: one of this name goes on from its last step")
      ->group("Memory");
}

void describe_schedule(CLI::App& app, RunOptions& run) {
  TrainingOptions& training = run.training;
  app.add_option("--prefetch", training.schedule.prefetch, "Units that are gathered ahead")
      ->capture_default_str()
      ->group("Schedule");
  app.add_option("--tile", training.tile_elements, "Elements that are updated, read and written at a time")
      ->capture_default_str()
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::PositiveNumber)
      ->group("Schedule");
  app.add_option("--staging", training.schedule.staging_slots, "Tiles on their way from and to drives")
      ->capture_default_str()
      ->group("Schedule");
  app.add_flag("--update-in-backward", training.schedule.update_in_backward, "Update as soon as gradients are there")
      ->group("Schedule");
  app.add_flag("--wait-for-updates", run.waits_for_updates, "Begin no step before the last one's updates are done")
      ->group("Schedule");
}

void describe_machine(CLI::App& app, ProgramOptions& options) {
  app.add_option("--ranks", options.ranks, "Ranks, as threads of this process; else those that a launcher started")
      ->capture_default_str()
      ->check(CLI::Range(1, 64))
      ->group("Machine");
  app.add_option("--threads", options.threads, "CPU threads of each rank; by default its share of the cores")
      ->check(CLI::Range(1, 1024))
      ->group("Machine");
  app.add_option("--gpu", options.run.training.gpu, "Compute on this GPU; launched ranks: on the one of their number")
      ->expected(0, 1)
      ->default_str("0")
      ->group("Machine");
  MemoryOptions& memory = options.run.memory;
  app.add_option_function<std::string>(
         "--memory-limit", [&memory](const std::string& asked) { memory.limit = parse_bytes(asked); },
         "Of this process, such as 4GiB: a run that needs more is refused, and the kernel sees to it")
      ->type_name("BYTES")
      ->excludes("--gpu")
      ->group("Machine");
}

void describe_output(CLI::App& app, ProgramOptions& options) {
  app.add_flag("--forecast", options.run.forecasts, "Measure this machine first, and say what a step will take (CPUs)")
      ->group("Output");
  app.add_option("--losses", options.losses, "Write losses and norms exactly, and a hash of the last parameters")
      ->group("Output");
  app.add_option("--json", options.json, "Write a line of JSON for each step")->group("Output");
  app.add_option("--timeline", options.timeline, "Write what ran when on rank 0, for ui.perfetto.dev")->group("Output");
  app.add_option("--save", options.save, "Write the last parameters, as fp32 one after the other")->group("Output");
}

}  // namespace

void describe(CLI::App& app, ProgramOptions& options) {
  app.option_defaults()->take_last();  // so that a script's options can be followed by one's own
  describe_model(app, options.run);
  describe_steps(app, options.run);
  describe_placement(app, options.run.training);
  describe_schedule(app, options.run);
  describe_machine(app, options);
  describe_output(app, options);
}

}  // namespace ballast::gpt

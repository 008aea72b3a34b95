/* Injected faults: rules "name@when=action", matched by call or work name.
 * It decides and acts; it knows no call and no device.
 *
 *   when    N | N-M | N+ | * | /K (each K-th) | %P (percent, repeatable by the seed switch)
 *   action  a result code | after:CODE | sticky:CODE | sleep:MS | hang | kill | stop | segv | abort
 *
 * Calls are counted per rule, from the moment the rule was set.  A name may end in '*'. */
#include "core.h"

#include <ctype.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct rule {
  char name[72];
  char when;
  long from, to;
  struct ds_fault fault;
  long seen;
};

enum { RULES = 64 };
static struct rule rules[RULES];
static atomic_int rule_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static uint64_t dice;

static bool read_when(const char *text, struct rule *rule) {
  char *end = NULL;
  rule->when = 'n';
  if (!strcmp(text, "*")) {
    rule->from = 1;
    rule->to = 0;
    return true;
  }
  if (*text == '/' || *text == '%') {
    rule->when = *text++;
    rule->from = strtol(text, &end, 10);
    return end != text && !*end && rule->from > 0;
  }
  rule->from = rule->to = strtol(text, &end, 10);
  if (end == text || rule->from < 1)
    return false;
  if (!strcmp(end, "+")) {
    rule->to = 0;
    return true;
  }
  if (*end == '-') {
    const char *upper = end + 1;
    rule->to = strtol(upper, &end, 10);
    return end != upper && !*end && rule->to >= rule->from;
  }
  return !*end;
}

static bool read_action(const char *text, struct ds_fault *fault) {
  static const struct {
    const char *word;
    enum ds_action action;
    bool takes_number;
  } words[] = {{"after:", DS_AFTER, true}, {"sticky:", DS_STICKY, true}, {"sleep:", DS_SLEEP, true},
               {"hang", DS_HANG, false},   {"kill", DS_KILL, false},     {"stop", DS_STOP, false},
               {"segv", DS_SEGV, false},   {"abort", DS_ABORT, false}};
  fault->action = DS_CODE;
  fault->arg = 0;
  bool takes_number = true;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (!strncmp(text, words[i].word, strlen(words[i].word))) {
      fault->action = words[i].action;
      takes_number = words[i].takes_number;
      text += strlen(words[i].word);
      break;
    }
  if (!takes_number)
    return !*text;
  char *end = NULL;
  fault->arg = strtol(text, &end, 0);
  return end != text && !*end;
}

static bool read_rule(char *text, struct rule *rule) {
  memset(rule, 0, sizeof *rule);
  while (isspace((unsigned char)*text))
    text++;
  char *at = strchr(text, '@');
  char *is = at ? strchr(at, '=') : NULL;
  if (!is || at == text || (size_t)(at - text) >= sizeof rule->name)
    return false;
  *at = *is = 0;
  strcpy(rule->name, text);
  return read_when(at + 1, rule) && read_action(is + 1, &rule->fault);
}

static int add(const char *spec) {
  char copy[2048];
  if (strlen(spec) >= sizeof copy)
    return -1;
  strcpy(copy, spec);
  char *rest = copy;
  int result = 0;
  pthread_mutex_lock(&lock);
  for (char *word; result == 0 && (word = strsep(&rest, ",;"));) {
    int n = atomic_load(&rule_count);
    if (!*word)
      continue;
    if (n == RULES || !read_rule(word, &rules[n]))
      result = -1;
    else
      atomic_store(&rule_count, n + 1);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static void load(void) {
  dice = (uint64_t)ds_switch(DS_seed) * 2654435761u + 1;
  const char *spec = ds_text("fault");
  if (*spec && add(spec) != 0) {
    fprintf(stderr, "devsim: cannot read DEVSIM_FAULT=%s\n", spec);
    abort();
  }
}

int ds_inject(const char *spec) {
  pthread_once(&loaded, load);
  if (!strcmp(spec, "clear")) {
    pthread_mutex_lock(&lock);
    atomic_store(&rule_count, 0);
    pthread_mutex_unlock(&lock);
    return 0;
  }
  return add(spec);
}

static bool named(const struct rule *rule, const char *name) {
  size_t n = strlen(rule->name);
  if (n && rule->name[n - 1] == '*')
    return !strncmp(rule->name, name, n - 1);
  return !strcmp(rule->name, name);
}

static bool strikes(struct rule *rule) {
  rule->seen++;
  if (rule->when == '/')
    return rule->seen % rule->from == 0;
  if (rule->when == '%') {
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    return (long)((dice >> 33) % 100) < rule->from;
  }
  return rule->seen >= rule->from && (!rule->to || rule->seen <= rule->to);
}

struct ds_fault ds_fault_at(const char *name) {
  struct ds_fault found = {DS_GO, 0};
  pthread_once(&loaded, load);
  if (!atomic_load(&rule_count))
    return found;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < atomic_load(&rule_count); i++)
    if (named(&rules[i], name) && strikes(&rules[i]) && found.action == DS_GO)
      found = rules[i].fault;
  pthread_mutex_unlock(&lock);
  return found;
}

void ds_act(struct ds_fault fault) {
  switch (fault.action) {
    case DS_SLEEP: ds_sleep_us(fault.arg * 1000); break;
    case DS_HANG: for (;;) pause(); break;
    case DS_KILL: kill(getpid(), SIGKILL); for (;;) pause(); break;
    case DS_STOP: raise(SIGSTOP); break;
    case DS_SEGV: signal(SIGSEGV, SIG_DFL); raise(SIGSEGV); break;
    case DS_ABORT: signal(SIGABRT, SIG_DFL); abort(); break;
    default: break;
  }
}

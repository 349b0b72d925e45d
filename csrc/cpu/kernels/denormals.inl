// Denormals are zero between begin and end, as they are for tiles: attention makes them where scores lie far apart, and a
// vector that meets one takes a hundred cycles.
static unsigned& control() {
  static thread_local unsigned before = 0;
  return before;
}
static void flush_denormals() {
  control() = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(control() | 0x8040);
}
static void restore_denormals() { __builtin_ia32_ldmxcsr(control()); }

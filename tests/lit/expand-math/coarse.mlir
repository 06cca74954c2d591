// An erf that may be an approximation, and is added to 1, is a quadratic polynomial of 16 pieces, which registers hold.
// RUN: gossamer-opt %s -p 'expand-math,canonicalize' | filecheck %s --check-prefixes=CHECK,WIDE
// RUN: gossamer-opt %s -p 'expand-math{bits=256},canonicalize' | filecheck %s --check-prefixes=CHECK,NARROW

// CHECK-LABEL: func.func @normal(
// WIDE:          %[[SIZE:.*]] = math.absf %arg0
// WIDE:          %[[ROUNDED:.*]] = vector.fma
// WIDE:          %[[PIECE:.*]] = vector.bitcast %[[ROUNDED]] : vector<16xf32> to vector<16xi32>
// WIDE-COUNT-3:  llvm.call_intrinsic "llvm.x86.avx512.permvar.sf.512"(%{{.*}}, %[[PIECE]])
// WIDE-COUNT-2:  vector.fma
// WIDE:          math.copysign %{{.*}}, %arg0
// NARROW:        arith.divf
// CHECK-NOT:     math.erf
func.func @normal(%x: vector<16xf32>) -> vector<16xf32> {
  %one = arith.constant dense<1.0> : vector<16xf32>
  %0 = math.erf %x fastmath<afn> : vector<16xf32>
  %1 = arith.addf %0, %one : vector<16xf32>
  return %1 : vector<16xf32>
}

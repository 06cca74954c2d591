// Four neighbours along K at once, by dot products of bytes.
// RUN: gossamer-opt %s -p 'expose-storage,lower-quads,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile64(
// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x70xi8>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xi8>,
// CHECK-DAG:     %[[HIGH:.*]] = arith.constant dense<-128> : vector<64xi8>
// CHECK:         %[[PACKED:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x128xi8>

// Whole vectors of columns are read without a mask, the last six with one; 128 is added to both.
// CHECK-COUNT-16: vector.load %{{.*}} : memref<?x70xi8>, vector<64xi8>
// CHECK:         %[[LINE:.*]] = arith.xori %{{.*}}, %[[HIGH]] : vector<64xi8>
// CHECK-NEXT:    vector.store %[[LINE]], %[[PACKED]]
// CHECK-COUNT-16: vector.maskedload %{{.*}} : memref<?x70xi8>, vector<64xi1>, vector<64xi8> into vector<64xi8>

// Four quads a round, in two sets of sums; what 128 adds is summed beside them, and taken away in the end.
// CHECK:         scf.for %{{.*}} step %c4 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_#]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_#]*}}, %[[TOO:[a-z0-9]*]] = %{{[a-z0-9_#]*}},
// CHECK:           memref.load %[[CRD]]
// CHECK:           vector.load %[[VAL]][%{{.*}}] : memref<?xi8>, vector<4xi8>
// CHECK:           %[[W:.*]] = vector.bitcast %{{.*}} : vector<16xi32> to vector<64xi8>
// CHECK:           %[[A:.*]] = vector.load %[[PACKED]]
// CHECK:           %[[B:.*]] = vector.load %[[PACKED]]
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"(%[[S0]], %[[A]], %[[W]])
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"(%[[S1]], %[[B]], %[[W]])
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"(%[[TOO]], %[[HIGH]], %[[W]])
// CHECK:         arith.subi
// CHECK:         arith.sitofp %{{.*}} : vector<16xi32> to vector<16xf32>

// Up to eight tokens are half a vector.
// CHECK-LABEL: func.func private @region_tile8(
// CHECK:         "llvm.x86.avx512.vpdpbusd.256"
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, "quads(reduction=1, rows=1, width=72)">, %scale: tensor<40xf32>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %s = "kernel.read"(%scale) {map = affine_map<(t, m) -> (m)>} : (tensor<40xf32>) -> f32
    %0 = arith.sitofp %sum : i32 to f32
    %1 = arith.mulf %0, %s : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "quads", tile = [64, 1024, 1]} : (tensor<?x70xi8>, tensor<40x70xi8, "quads(reduction=1, rows=1, width=72)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
